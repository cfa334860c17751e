"""CTranslate2's side of `embedded.py`: a process of its own that answers timing requests.

CTranslate2's converter needs an older Transformers than the project, so it runs in its own environment:

    python3 -m venv ct2
    ct2/bin/pip install torch==2.13.0 "transformers<5.20" ctranslate2==4.8.5
    python benchmarks/embedded.py --ctranslate2 ct2/bin/python

Usage: ctranslate2_side.py MODEL_FOLDER THREADS. The same weights are converted to CTranslate2's format, in
float32. Requests and answers are JSON objects, one a line, on stdin and stdout:

    {"token_ids": [1, 2, 3], "new_tokens": 0, "save": null}  ->  {"seconds": 0.5}

``new_tokens`` 0 asks for the prompt's rows, otherwise for so many greedy tokens with their rows; ``save`` is
a file for the prompt's rows, a NumPy array ``[L, vocab]`` in float32. The first line is
``{"versions": "ctranslate2 4.8.5, …"}``.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import ctranslate2  # type: ignore[import-not-found]  # of its own environment
import numpy as np
import transformers


class Side:
    """A loaded generator and its tokenizer.

    Args:
        folder: of the Transformers model.
        work: folder for the converted model.
        threads: of one product.
    """

    def __init__(self, folder: str, work: str, threads: int) -> None:
        converted = str(pathlib.Path(work, "model"))
        ctranslate2.converters.TransformersConverter(folder).convert(converted, quantization="float32")
        self.generator = ctranslate2.Generator(
            converted, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run one request and say how long it took; turning ids into strings is off the clock."""
        tokens = self.tokenizer.convert_ids_to_tokens(request["token_ids"])
        new = request["new_tokens"]
        begun = time.perf_counter()
        rows = self.generated(tokens, new) if new else self.prompt(tokens)
        seconds = time.perf_counter() - begun
        if request.get("save"):
            np.save(request["save"], rows[0])
        return {"seconds": seconds, "rows": sum(len(part) for part in rows)}

    def prompt(self, tokens: list[str]) -> list[np.ndarray]:
        """Rows of a prompt, ``[L, vocab]``, as the library holds them."""
        return [np.asarray(self.generator.forward_batch([tokens]))[0]]

    def generated(self, tokens: list[str], new: int) -> list[np.ndarray]:
        """Rows of ``new`` greedy tokens, one array ``[1, vocab]`` a token."""
        result = self.generator.generate_batch(
            [tokens],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
            return_logits_vocab=True,
        )[0]
        return [np.asarray(row).reshape(1, -1) for row in result.logits[0]]


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    folder, threads = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work:
        side = Side(folder, work, int(threads))
        versions = f"ctranslate2 {ctranslate2.__version__}, transformers {transformers.__version__}"
        print(json.dumps({"versions": versions}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(side.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
