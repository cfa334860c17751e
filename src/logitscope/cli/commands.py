"""The commands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

import logitscope
from logitscope.cli import options as opt
from logitscope.cli.report import INTERRUPTED, USAGE, command, row_progress, say, spinner, stdout
from logitscope.engines.transformers.gguf import BUNDLED
from logitscope.errors import MissingDependencyError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from logitscope.engines.base import Engine
    from logitscope.engines.results import Generation
    from logitscope.logits import Logits, LogitsBatch

_T = TypeVar("_T")

app = typer.Typer(
    name="logitscope",
    help="The complete logits of language models: every token's scores at every position.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEMO_PROMPT = "The capital of France is"
_DEMO_FILE = Path("logitscope-demo.npz")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Usage errors are one line on stderr and code 2."""
    try:
        return int(app(arguments, prog_name="logitscope", standalone_mode=False) or 0)
    except typer.Abort:
        say("interrupted")
        return INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):  # what Typer's usage errors have, in every release
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "logitscope")
        say(f"error: {error.format_message().rstrip('.')}. Try: {path} --help")
        return USAGE


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"logitscope {logitscope.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the model reads.")] = _DEMO_PROMPT,
    max_new_tokens: opt.MaxNewTokens = 16,
    out: opt.Out = _DEMO_FILE,
    traceback: opt.Traceback = False,
) -> None:
    """Show the complete logits of a sentence and of what a small real model writes after it."""
    with command(traceback=traceback):
        from logitscope.cli.results import logits_of, show_generation

        with _open(BUNDLED) as engine, row_progress("generating") as progress:
            generation = cast(
                "Generation",
                engine.generate(prompt, max_new_tokens=max_new_tokens, return_logits=True, progress=progress),
            )
        console = stdout()
        typer.echo(f"prompt  {prompt}")
        show_generation(console, generation, top=5)
        if out is not None:
            logits_of(generation).save(out)
            typer.echo(f"saved   {out} (logitscope.load reads it, numpy.load too)")


@app.command()
def logits(
    model: opt.ModelOrUrl = None,
    text: opt.Texts = None,
    url: opt.Url = None,
    api_key: opt.ApiKey = None,
    file: opt.File = None,
    whole: opt.Whole = False,
    as_json: opt.Json = False,
    html: opt.Html = None,
    out: opt.Out = None,
    select: opt.SelectRows = "all",
    columns: opt.Columns = None,
    encode: opt.Encode = None,
    summary: opt.Summary = False,
    dtype: opt.ModelDtype = None,
    device: opt.Device = None,
    top: opt.Top = 5,
    traceback: opt.Traceback = False,
) -> None:
    """Score prompts: one row of logits for each token, the last one tells what comes next."""
    with command(traceback=traceback):
        from logitscope.cli import results
        from logitscope.cli.inputs import prompts

        name, texts = opt.source(model, url, text)
        inputs = prompts(texts, file, whole=whole)
        with (
            _open(name, dtype=dtype, device=device, api_key=api_key) as engine,
            row_progress("scoring") as progress,
        ):
            chosen = opt.selection(select, columns)
            keep: dict[str, Any] = {"select": chosen, "encode": encode, "summary": _summary(chosen, summary)}
            members = list(cast("LogitsBatch", engine.logits(inputs, **keep, progress=progress)))
        if as_json:
            for member in members:
                typer.echo(results.json_line(results.document(member, top=top, every_summary=summary)))
        else:
            _show(members, partial(results.show, top=top))
        _write(members, html=html, out=out)


@app.command()
def generate(
    model: opt.ModelOrUrl = None,
    text: opt.Texts = None,
    url: opt.Url = None,
    api_key: opt.ApiKey = None,
    file: opt.File = None,
    whole: opt.Whole = False,
    max_new_tokens: opt.MaxNewTokens = 16,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="0 is greedy; else logits are divided by it.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Draw from the k best tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Draw from the smallest set with this mass.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(metavar="P", help="Draw from tokens of this share of the best one's.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="X", help="Above 1 discourages repetition.")
    ] = 1.0,
    logit_bias: Annotated[
        list[Any] | None,
        typer.Option(metavar="ID:VALUE", parser=opt.parse_bias, help="Add a value to a token's logit."),
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Of the draw; the result tells it.")] = None,
    n: Annotated[int, typer.Option("--n", metavar="N", min=1, help="Samples of each prompt.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End at this text; may be given again.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the model's end of text.")
    ] = False,
    as_json: opt.Json = False,
    html: opt.Html = None,
    out: opt.Out = None,
    select: opt.SelectRows = "all",
    columns: opt.Columns = None,
    encode: opt.Encode = None,
    summary: opt.Summary = False,
    dtype: opt.ModelDtype = None,
    device: opt.Device = None,
    top: opt.Top = 5,
    traceback: opt.Traceback = False,
) -> None:
    """Continue prompts, and show the logits of the prompt's and of the generated tokens."""
    with command(traceback=traceback):
        from logitscope.cli import results
        from logitscope.cli.inputs import prompts

        name, texts = opt.source(model, url, text)
        inputs = prompts(texts, file, whole=whole)
        with (
            _open(name, dtype=dtype, device=device, api_key=api_key) as engine,
            row_progress("generating") as progress,
        ):
            chosen = opt.selection(select, columns)
            keep: dict[str, Any] = {"select": chosen, "encode": encode, "summary": _summary(chosen, summary)}
            found = engine.generate(
                inputs,
                max_new_tokens=max_new_tokens,
                return_logits=True,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                logit_bias=dict(logit_bias or ()),
                seed=seed,
                n=n,
                stop=stop or (),
                ignore_eos=ignore_eos,
                **keep,
                progress=progress,
            )
            generations = cast("list[Generation]", found)
        if as_json:
            for one in generations:
                typer.echo(
                    results.json_line(results.generation_document(one, top=top, every_summary=summary))
                )
        else:
            _show(generations, partial(results.show_generation, top=top))
        _write([results.logits_of(one) for one in generations], html=html, out=out)


@app.command()
def serve(
    model: opt.Model,
    host: Annotated[str, typer.Option(metavar="NAME", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="LOGITSCOPE_API_KEY", help="That clients must send as a bearer token."
        ),
    ] = None,
    body_mb: Annotated[int, typer.Option(metavar="MB", min=1, help="The largest body that is read.")] = 64,
    origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let web pages of this origin ask (CORS); may be given again."),
    ] = None,
    no_shared_memory: Annotated[
        bool,
        typer.Option("--no-shared-memory", help="Clients on this host get rows over HTTP, as others do."),
    ] = False,
    dtype: opt.ModelDtype = None,
    device: opt.Device = None,
    traceback: opt.Traceback = False,
) -> None:
    """Serve a model's logits over HTTP: logitscope.open("http://…") is an engine like one here."""
    with command(traceback=traceback):
        try:
            from logitscope.server.serve import serve as run
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"serving needs {error.name}", where="serve", fix="pip install 'logitscope[serve]'"
            ) from error
        engine = _open(model, dtype=dtype, device=device)
        run(
            engine,
            host=host,
            port=port,
            api_key=api_key,
            body_bytes=body_mb * 10**6,
            origins=origin or (),
            shared_memory=not no_shared_memory,
            ready=lambda address: say(f"serving {model} at {address}"),
        )


@app.command()
def doctor(
    engine: Annotated[Literal["sglang"], typer.Argument(help="Beside which engine the plugin is installed.")],
    traceback: opt.Traceback = False,
) -> None:
    """Check whether the plugin for an engine finds all that it hooks into."""
    with command(traceback=traceback):
        from logitscope.cli.doctor import check_table, state_of

        with spinner(f"loading {engine}"):
            found = state_of(engine)
        stdout().print(check_table(found))
        if any(state != "ok" for state in found.values()):
            raise UnsupportedError("return_logits cannot work here", where=engine, fix="See the table.")


@app.command()
def models(as_json: opt.Json = False, traceback: opt.Traceback = False) -> None:
    """List the models that open by name without a download, and their sizes."""
    with command(traceback=traceback):
        from logitscope.cli.models import known_models, models_table

        found = known_models()
        if as_json:
            for model in found:
                typer.echo(json.dumps(dataclasses.asdict(model)))
        else:
            stdout().print(models_table(found))
            typer.echo("Any other hub name, model folder or .gguf file opens too.")


def _open(
    model: str, *, dtype: str | None = None, device: str | None = None, api_key: str | None = None
) -> Engine:
    from logitscope.engines.registry import engine_class

    if model.startswith(("http://", "https://")):
        for name, given in (("--dtype", dtype), ("--device", device)):
            if given is not None:
                raise typer.BadParameter(f"{name} is the server's own: give it to logitscope serve.")
        return logitscope.open(model, api_key=api_key)
    with spinner("loading PyTorch"):
        engine_class("transformers")  # the slow imports
    _convert(model)
    with spinner(f"loading {model}"):
        return logitscope.open(model, dtype=dtype, device=device)


def _convert(model: str) -> None:
    """Convert a GGUF file before the model is loaded: that has a progress bar of its own."""
    from logitscope.engines.transformers import gguf

    file = gguf.bundled() if model == BUNDLED else Path(model) if model.endswith(".gguf") else None
    if file is not None:
        gguf.converted(file)


def _summary(select: Any, wanted: bool) -> bool:
    return wanted or select.vocab is None


def _show(found: Sequence[_T], show: Callable[[Console, _T], None]) -> None:
    """Each result on the terminal, numbered when there are several."""
    console = stdout()
    for i, one in enumerate(found):
        if len(found) > 1:
            typer.echo(("\n" if i else "") + f"== {i + 1} of {len(found)}")
        show(console, one)


def _write(members: list[Logits], *, html: Path | None, out: Path | None) -> None:
    from logitscope.cli import results

    if html is not None:
        results.write_html(html, members)
        say(f"wrote {html}")
    if out is not None:
        results.write_arrays(out, members, single=len(members) == 1)
        say(f"wrote {out}")
