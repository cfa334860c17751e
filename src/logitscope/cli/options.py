"""The options that commands share."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from logitscope.rows import POSITION_NAMES, Select

_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?(?::(-?\d+))?")
_LIST = re.compile(r"-?\d+(,-?\d+)*")
_FILES = (".npz", ".safetensors")
_CUTS = ("top_k", "top_p", "min_p", "threshold", "sample")


class Dtype(enum.StrEnum):
    """Formats of values and weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class EncodingName(enum.StrEnum):
    """Formats of kept rows."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    q16 = "q16"
    q8 = "q8"
    float8 = "float8"
    hidden = "hidden"
    hidden_float16 = "hidden-float16"


def source(model: str | None, url: str | None, texts: list[str] | None) -> tuple[str, list[str] | None]:
    """What is opened, and the texts: with an address every argument is one."""
    if url is None:
        if model is None:
            raise typer.BadParameter("give a MODEL, or --url.")
        return model, texts
    return url, texts if model is None else [model, *(texts or ())]


def parse_select(text: str) -> Select:
    """``all``, ``prompt``, ``generated``, ``last``, ``a:b``, ``1,2,3``, or ``none`` for summaries alone."""
    if text == "none":
        return Select(vocab=None)
    if text in POSITION_NAMES:
        return Select(positions=text)
    if sliced := _SLICE.fullmatch(text):
        bounds = [None if bound is None else int(bound) for bound in sliced.groups()]
        if bounds[2] != 0:
            return Select(positions=slice(*bounds))
    if _LIST.fullmatch(text):
        return Select(positions=[int(position) for position in text.split(",")])
    raise typer.BadParameter(f"{text!r} is none of {', '.join(POSITION_NAMES)}, none, a:b, or 1,2,3.")


def parse_columns(text: str) -> dict[str, Any]:
    """``top_k=64``, ``top_p=0.9``, ``sample=32,temperature=0.7``, ``1,2,3``, or texts as a JSON list."""
    try:
        if text.lstrip().startswith("["):
            return {"vocab": json.loads(text)}
        if _LIST.fullmatch(text):
            return {"vocab": [int(token_id) for token_id in text.split(",")]}
        found = {
            name: json.loads(value) for name, _, value in (one.partition("=") for one in text.split(","))
        }
        if found and set(found) <= {*_CUTS, "temperature", "seed"}:
            return found
    except ValueError:
        pass
    raise typer.BadParameter(
        f'{text!r} is none of {", ".join(f"{name}=…" for name in _CUTS)}, 1,2,3, or [" yes", " no"].'
    )


def selection(rows: Select, columns: dict[str, Any] | None) -> Select:
    """Rows and columns of both options.

    Raises:
        SelectError: they contradict each other.
    """
    return rows if columns is None else dataclasses.replace(rows, **columns)


def parse_bias(text: str) -> tuple[int, float]:
    """``ID:VALUE`` of a logit bias."""
    token_id, _, value = text.partition(":")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not ID:VALUE, such as 50:-100.") from None


def _array_file(path: Path | None) -> Path | None:
    if path is not None and path.suffix not in _FILES:
        raise typer.BadParameter(f"{str(path)!r} ends in neither {' nor '.join(_FILES)}.")
    return _in_a_folder(path)


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"the folder {str(path.parent)!r} does not exist.")
    return path


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name ('smollm2', or one of the Hugging Face hub), a model folder, or a .gguf file.",
        show_default=False,
    ),
]
ModelOrUrl = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name ('smollm2', or one of the Hugging Face hub), a model folder, a .gguf file, or the "
        "address of a server (http://…).",
        show_default=False,
    ),
]
Url = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ask this server; there is no MODEL then, and arguments are TEXT."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", envvar="LOGITSCOPE_API_KEY", help="Of the server: a bearer token."),
]
Texts = Annotated[
    list[str] | None, typer.Argument(metavar="TEXT", help="Prompts, one each.", show_default=False)
]
File = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Read prompts from a file, one a line ('-' is stdin). Blank lines are skipped."
    ),
]
Whole = Annotated[bool, typer.Option("--whole", help="The file, or stdin, is one prompt.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document a result, one a line, on stdout.")]
Html = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Also write an HTML page: the text coloured by surprise.", callback=_in_a_folder
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Also save everything to a .npz or .safetensors file.", callback=_array_file
    ),
]
SelectRows = Annotated[
    Any,
    typer.Option(
        "--select",
        metavar="ROWS",
        parser=parse_select,
        help="Rows to keep: all, prompt, generated, last, a:b, or 1,2,3; none keeps summaries alone.",
    ),
]
Columns = Annotated[
    Any,
    typer.Option(
        "--columns",
        metavar="COLUMNS",
        parser=parse_columns,
        help="Columns to keep of each row: top_k=64, top_p=0.9, min_p=0.1, threshold=5, sample=32 (with "
        "temperature= and seed=), token ids 1,2,3, or texts as a JSON list.",
    ),
]
Encode = Annotated[
    EncodingName | None, typer.Option(help="Format of the kept rows; the model's own dtype by default.")
]
Summary = Annotated[
    bool, typer.Option("--summary", help="Also keep all per-row summaries (in the file and the JSON).")
]
ModelDtype = Annotated[Dtype | None, typer.Option(help="Dtype of the model; what its files say by default.")]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, mps; the first of CUDA, MPS and CPU by default."),
]
Top = Annotated[int, typer.Option(metavar="N", min=0, help="How many of the best tokens are shown.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Generate at most so many tokens.")]
Traceback = Annotated[
    bool,
    typer.Option("--traceback", envvar="LOGITSCOPE_TRACEBACK", help="Show where an error came from."),
]
