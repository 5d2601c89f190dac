"""Compare llama.cpp with this package on the same GGUF file and the same prompts. Needs Linux.

    python -m venv llama && llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    python benchmarks/llama_cpp_beside.py qwen --llama-python llama/bin/python --threads 1

Prompts are questions over six of 40 articles, as token ids, so both engines compute exactly the
same tokens. Each question is answered greedily in five ways, one after the other:

- ``llama.cpp``: full prefill.
- ``llama.cpp, prompt cache``: the common prefix with the previous prompt is reused.
- ``full``: this package in full mode.
- ``recompute``, ``fast``: block mode with these recipes, and passages encoded in advance.

Each engine runs in a separate process, so that memory can be compared. llama.cpp's answers have the
length of this package's answer in full mode. The first question is a warm-up and is not counted.
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
    """A process that answers prompts, one line of JSON each."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request, and wait for the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A worker ended with status {self._process.wait()}")
        self.last: dict[str, Any] = json.loads(line)
        return self.last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the process."""
        self._process.communicate()


def serve(model: str, threads: int, dtype: str) -> None:
    """Answer the requests of the standard input with this package.

    A request has the index of a question and a row.
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
    """Answer to one question in one way.

    Args:
        next_s: Seconds per token after the first.
        equal: Whether the tokens equal this package's answer in full mode.
    """

    row: str
    question: int
    prompt_tokens: int
    new_tokens: int
    ttft_s: float
    next_s: float
    equal: bool


def measure(ours: Worker, llama: Worker, questions: int) -> Iterator[Answer]:
    """Answer questions in every way, after a warm-up question."""
    for question in range(questions + 1):
        replies = {"full": ours.ask(question=question, row="full")}
        tokens = replies["full"]["tokens"]
        size = len(replies["full"]["answer"])
        for row in RECIPES:
            replies[row] = ours.ask(question=question, row=row)
        # The cached way runs first, because the other way leaves its own prompt in the cache.
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
    """Medians by row, and the memory of both processes, as Markdown."""
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
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 1,
    questions: Annotated[int, typer.Option(help="Questions to count.")] = 8,
    dtype: Annotated[str, typer.Option(help="Type of this package's weights.")] = "float32",
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Compare both engines, and write the figures to the results."""
    if worker:
        serve(model, threads, dtype)
        return
    if llama_python is None:
        raise typer.BadParameter(
            "Missing --llama-python: pass the Python that has llama-cpp-python"
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
