"""Compare the answers of a server and an in-process engine with the same recipe.

    python benchmarks/recipe_parity.py --prompts 200
    python benchmarks/recipe_parity.py --model smollm2 --recipe auto --prompts 200

Both use float32. A server with an empty store is started for each number of ranks. By default, the
recipe has a random adapter and promotes one passage. The exit status is 1 if the greedy tokens of
any answer differ. Run the script in the environment of `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import typer
from openai_client import Answer, Question, ask
from serving_load import ENVIRONMENT, closed_loop, host, write
from tables import markdown

from blockattn_rag import BlockAttentionEngine, MemoryStore, Passage
from blockattn_rag.engine.find_recipe import resolve_recipe
from blockattn_rag.model import BlockModel
from blockattn_rag.model.loading import resolve_name
from tests.recipes import recipe_of
from tests_vllm.reference import PACKAGE
from tests_vllm.server import Server

MOST_AT_ONCE = 8


def questions_of(count: int) -> list[Question]:
    """Return questions from the bundled data, with 3 to 6 passages from two records, shuffled."""
    file = PACKAGE / "app" / "demo" / "data" / "test-order-5.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    choose = random.Random(0)
    found = []
    for _ in range(count):
        first, second = choose.sample(records, 2)
        passages = [Passage("", one["text"]) for one in (*first["passages"], *second["passages"])]
        taken = choose.sample(passages, min(len(passages), choose.randint(3, 6)))
        found.append(Question(first["question"], tuple(taken)))
    return found


@contextmanager
def served(options: dict[str, Any], ranks: int, model: str, log: Path) -> Iterator[Server]:
    """Run a server with ``ranks`` ranks."""
    bind = "nobind" if ranks == 1 else "|".join(map(str, range(ranks)))
    environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": bind}
    more = ("--tensor-parallel-size", str(ranks))
    server = Server(options, log, *more, model=model, environment=environment)
    try:
        yield server.wait()
    finally:
        server.close()


async def answers_of(server: Server, questions: Sequence[Question], tokens: int) -> list[Answer]:
    """Return the answers of a server, which receives the passages as documents."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        bodies = [one.documents | {"max_tokens": tokens} for one in questions]
        return await closed_loop([partial(ask, http, server, one) for one in bodies], MOST_AT_ONCE)


def main(
    model: str = "bundled",
    recipe: Annotated[str, typer.Option(help="Recipe, as for an engine, or 'random'.")] = "random",
    prompts: int = 200,
    ranks: str = "1,2",
    tokens: int = 24,
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:
    path, questions = resolve_name(model), questions_of(prompts)
    local = BlockModel.from_pretrained(path, dtype="float32", device="cpu")
    is_random = recipe == "random"
    used = (
        recipe_of(local, size=0.05, promote=1)
        if is_random
        else resolve_recipe(recipe, local, MemoryStore(1))
    )
    options = {"max_new_tokens": tokens, "temperature": 0.0}
    engine = BlockAttentionEngine(local, MemoryStore(1 << 32), recipe=used)
    tokenizer = local.tokenizer.tokenizer
    expected = [engine.generate(one.documents_prompt(tokenizer), **options) for one in questions]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        used.save(folder / "recipe")
        for count in map(int, ranks.split(",")):
            config = {
                "recipe": str(folder / "recipe"),
                "store": str(folder / f"kv-{count}"),
                "memory": "1GiB",
            }
            with served(config, count, path, folder / f"{count}.log") as server:
                answers = asyncio.run(answers_of(server, questions, tokens))
            pairs = zip(answers, expected, strict=True)
            identical = sum(one.tokens == other.token_ids for one, other in pairs)
            rows.append({"ranks": count, "identical": identical})
    head = ("ranks", "prompts", "identical greedy tokens")
    table = markdown(head, [(r["ranks"], prompts, r["identical"]) for r in rows])
    given = {"model": model, "recipe": str(used), "prompts": prompts, "tokens": tokens}
    write(output, {**given, "machine": host(), "rows": rows}, table)
    print(f"{model}, recipe {used}, float32\n\n{table}")
    if any(row["identical"] < prompts for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
