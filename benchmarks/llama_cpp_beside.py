"""Compare llama.cpp with this package on the same GGUF file and prompts. Requires Linux.

    python -m venv llama && llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/llama_cpp_beside.py qwen --llama-python llama/bin/python --threads 1

Each prompt has a question and six of 40 articles. Prompts are passed as token ids, so both engines
compute exactly the same tokens. Each question is answered greedily in five configurations, one
after another:

- ``llama.cpp``: full prefill.
- ``llama.cpp, prompt cache``: the common prefix with the previous prompt is reused.
- ``full``: this package in full mode.
- ``recompute``, ``fast``: block mode with these recipes, and passages encoded in advance.

Each engine runs in a separate process, so that memory can be compared. llama.cpp's answers are as
long as this package's answer in full mode. The first question is a warm-up and not counted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import typer

sys.path.append(str(Path(__file__).parent / "quality"))

LLAMA, CACHED = "llama.cpp", "llama.cpp, prompt cache"
RECIPES = {"recompute": "head+recompute:0.1", "fast": "fast"}
ROWS = (LLAMA, CACHED, "full", *RECIPES)
RESULTS = Path(__file__).parent / "results"


class Worker:
    """Process that answers requests, one JSON object per line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and return the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A worker exited with status {self._process.wait()}")
        self.last: dict[str, Any] = json.loads(line)
        return self.last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Terminate the process."""
        self._process.communicate()


def serve(model: str, threads: int, dtype: str) -> None:
    """Answer requests from standard input with this package.

    A request contains the index of a question and a row of the table.
    """
    import sets
    import torch
    from llama_worker import memory
    from measuring import machine

    from blockattn_rag import BlockAttentionEngine
    from blockattn_rag.prompts.checkpoints import AUTO_FORMAT, format_for

    torch.set_num_threads(threads)
    engine = BlockAttentionEngine.from_pretrained(model, store="memory:", dtype=dtype)
    form, tokenizer = format_for(AUTO_FORMAT, engine.model.name), engine.model.tokenizer
    items = sets.facts()
    print(json.dumps(machine()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        item = items[request["question"]]
        prompt = form.prompt(item.question, item.passages, tokenizer.tokenizer)
        options: dict[str, Any] = {"mode": "full"}
        if recipe := RECIPES.get(request["row"]):
            options = {"recipe": recipe}
            engine.precompute(prompt.context, as_prompt=True, **options)
        found = engine.generate(prompt, max_new_tokens=32, do_sample=False, **options)
        ids = tokenizer.prompt_ids(prompt)
        reply = {
            "ttft_s": found.stats.ttft_s,
            "total_s": found.stats.total_s,
            "answer": found.token_ids,
            "tokens": [*(token for block in ids.context for token in block), *ids.final],
            **memory(),
        }
        print(json.dumps(reply), flush=True)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question in one configuration.

    Args:
        next_s: Seconds per token after the first.
        equal: Whether the tokens are the same as in this package's answer in full mode.
    """

    row: str
    question: int
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    next_s: float
    equal: bool


def measure(ours: Worker, llama: Worker, questions: int) -> Iterator[Answer]:
    """Answer questions in every configuration, after a warm-up question."""
    for question in range(questions + 1):
        replies = {"full": ours.ask(question=question, row="full")}
        tokens = replies["full"]["tokens"]
        size = len(replies["full"]["answer"])
        for row in RECIPES:
            replies[row] = ours.ask(question=question, row=row)
        # Run with the prompt cache first, because the full prefill replaces the cached prompt.
        for row, cached in ((CACHED, True), (LLAMA, False)):
            replies[row] = llama.ask(tokens=tokens, new_tokens=size, cached=cached)
        if question:
            for row in ROWS:
                reply = replies[row]
                count, rest_s = len(reply["answer"]), reply["total_s"] - reply["ttft_s"]
                equal = reply["answer"] == replies["full"]["answer"]
                next_s = rest_s / max(1, count - 1)
                yield Answer(row, question, len(tokens), count, reply["ttft_s"], next_s, equal)


def table(answers: Sequence[Answer], sizes: dict[str, dict[str, int]]) -> str:
    """Return the medians of each row, and the memory of both processes, as Markdown."""
    names = ("", "first token", "next tokens", "equal to full mode")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in ROWS:
        own = [answer for answer in answers if answer.row == row]
        cells = [
            row,
            f"{statistics.median(answer.ttft_s for answer in own):.2f} s",
            f"{1000 * statistics.median(answer.next_s for answer in own):.0f} ms",
            f"{sum(answer.equal for answer in own)} of {len(own)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for engine, size in sizes.items():
        memory, peak = (size[name] / 2**30 for name in ("memory_bytes", "peak_bytes"))
        lines.append(f"Memory of {engine}: {memory:.1f} GiB, at most {peak:.1f} GiB.")
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Argument(help="qwen, gemma, smollm2, or a GGUF file.")],
    llama_python: Annotated[Path | None, typer.Option(help="Python with llama-cpp-python.")] = None,
    threads: Annotated[int, typer.Option(help="Number of threads per engine.")] = 1,
    questions: Annotated[int, typer.Option(help="Questions, without the warm-up.")] = 8,
    dtype: Annotated[str, typer.Option(help="Data type of our weights.")] = "float32",
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Compare both engines, and write the results."""
    if worker:
        serve(model, threads, dtype)
        return
    if llama_python is None:
        raise typer.BadParameter(
            "Missing --llama-python: pass a Python interpreter with llama-cpp-python"
        )
    from models import model_path

    from blockattn_rag.model.gguf import SMOLLM2, smollm2

    path, here = smollm2() if model == SMOLLM2 else model_path(model), Path(__file__)
    options = [path, "--threads", str(threads)]
    ours = [sys.executable, str(here), *options, "--dtype", dtype, "--worker"]
    llama = [str(llama_python), str(here.with_name("llama_worker.py")), *options]
    with Worker(ours) as own, Worker(llama) as other:
        answers = [*measure(own, other, questions)]
        sizes = {"this package": own.last, "llama.cpp": other.last}
        about = {**own.about, "llama-cpp-python": other.about["version"]}
    text = table(answers, sizes)
    result = {"model": model, "dtype": dtype, "machine": about, "answers": [*map(asdict, answers)]}
    name = f"llama-cpp-{Path(model).stem}-{dtype}-{threads}"
    (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    typer.run(main)
