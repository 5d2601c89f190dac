"""Measure how much requests of other clients delay a running answer, with and without this package.

    python benchmarks/serving_gaps.py --folder /tmp/serving \
        --corpus corpus.jsonl.gz --asked nq_rag.jsonl.gz

One client streams a long answer, while another sends a question every half second. There are four
cases: no question, a question without passages, a question with passages that are in the server's
pages because another question just used them, and a question with passages that must be loaded. The
last two compute the same final block over the same tokens, so their difference is the cost of
loading or computing passages. To make this exact, words are appended to the last passage until the
context fills complete pages. The script alternates between systems and cases. Systems, folder and
environment are the same as for `serving_trace.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import httpx
import numpy as np
import typer
from openai_client import Answer, Question
from serving_load import closed_loop, host, write
from serving_systems import PAGE_TOKENS, SYSTEMS, Asker, Systems
from serving_trace import Trace, load_trace, prompt_ids, warm
from tables import markdown

from blockattn_rag import Passage
from blockattn_rag.model.loading import resolve_name

Way = Literal["nobody asks", "without passages", "passages in pages", "with passages"]
WAYS: tuple[Way, ...] = get_args(Way)
LONGEST = 1000
"""Maximum length of the long answer. The client disconnects before it is reached."""


async def watched(
    long: Asker, short: Asker, reader: Question, others: Sequence[Question | None], pace_s: float
) -> list[float]:
    """Return the gaps between the tokens of a long answer while another client sends questions.

    The measurement lasts from the first question to the first token of the last answer. Without
    questions, it lasts as long as sending them would take.
    """
    answer = Answer()
    reading = asyncio.ensure_future(long(reader, answer))
    while len(answer.tokens) < 4:
        await asyncio.sleep(0.01)
    begin = answer.times_s[-1]
    asking = []
    for one in others:
        asking.append(asyncio.ensure_future(short(one)) if one is not None else None)
        await asyncio.sleep(pace_s)
    answers = [await one for one in asking if one is not None]
    end = max((one.times_s[0] for one in answers), default=answer.times_s[-1])
    while answer.times_s[-1] < end:
        await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return [
        later - earlier
        for earlier, later in pairwise(answer.times_s)
        if later > begin and earlier < end
    ]


def in_whole_pages(model: str, question: Question) -> Question:
    """Lengthen the last passage of a question, so that its context fills complete pages."""
    *others, last = question.passages
    longer = [Passage(last.title, last.text.rstrip() + " a" * more) for more in range(PAGE_TOKENS)]
    questions = [Question(question.text, (*others, passage)) for passage in longer]
    for one, ids in zip(questions, prompt_ids(model, questions), strict=True):
        if sum(map(len, ids.context)) % PAGE_TOKENS == 0:
            return one
    raise ValueError(f"The context of {question.text!r} cannot be padded to complete pages.")


def with_final_blocks_of_others(questions: Sequence[Question]) -> list[Question]:
    """Combine the passages of each question with the text of the previous question."""
    return [
        Question(questions[place - 1].text, one.passages) for place, one in enumerate(questions)
    ]


def asked_in(way: Way, questions: Sequence[Question]) -> list[Question | None]:
    """Return the questions of the other client, with None where it sends nothing."""
    if way == "nobody asks":
        return [None] * len(questions)
    return [Question(one.text) if way == "without passages" else one for one in questions]


async def measure(
    systems: Systems, trace: Trace, per_round: int, pace_s: float
) -> dict[tuple[str, Way], list[float]]:
    """Measure the gaps between tokens, by system and case."""
    found: dict[tuple[str, Way], list[float]] = {
        (name, way): [] for name in systems.names for way in WAYS
    }
    turns = list(found)
    reader, *asked = trace["retrieved"]
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        await warm({name: systems.asker(http, name, 2) for name in systems.names}, trace, systems)
        for number, at in enumerate(range(0, len(asked), per_round)):
            for name, way in turns[number % len(turns) :] + turns[: number % len(turns)]:
                long = systems.asker(http, name, LONGEST)
                short = systems.asker(http, name, 1)
                questions = asked[at : at + per_round]
                if way == "passages in pages":
                    filling = with_final_blocks_of_others(questions)
                    await closed_loop([partial(short, one) for one in filling], 1)
                gaps = await watched(
                    long, short, Question(reader.text), asked_in(way, questions), pace_s
                )
                found[name, way] += gaps
                print(
                    f"round {number + 1}, {name}, {way}: {np.mean(gaps) * 1e3:.0f} ms", flush=True
                )
                await asyncio.sleep(0.5)  # Wait until the server cancels the long answer.
                systems.forget()
    return found


def rows(found: Mapping[tuple[str, Way], Sequence[float]]) -> list[dict[str, Any]]:
    """Return statistics by system and case. ``over_pages``: Mean gap divided by the mean gap with
    passages in pages."""
    return [
        {
            "system": name,
            "way": way,
            "gaps": len(gaps),
            "mean_s": float(np.mean(gaps)),
            "median_s": float(np.median(gaps)),
            "p95_s": float(np.quantile(gaps, 0.95)),
            "longest_s": float(np.max(gaps)),
            "over_pages": float(np.mean(gaps) / np.mean(found[name, "passages in pages"])),
        }
        for (name, way), gaps in found.items()
    ]


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Format the statistics as a Markdown table."""
    lines = []
    for one in figures:
        times = (one[name] for name in ("mean_s", "median_s", "p95_s", "longest_s"))
        shown = (f"{time * 1e3:,.0f} ms" for time in times)
        over = f"{one['over_pages']:.2f}"
        lines.append((SYSTEMS[one["system"]].title, one["way"], *shown, over))
    head = ("system", "others ask", "mean", "median", "p95", "longest", "over passages in pages")
    return markdown(head, lines)


def main(
    corpus: Annotated[Path, typer.Option()],
    asked: Annotated[Path, typer.Option(help="Questions, in the format of `eval --data`.")],
    folder: Annotated[Path, typer.Option(help="Folder for the store, the profile and logs.")],
    output: Annotated[Path | None, typer.Option()] = None,
    systems: str = "prefix,memory,disk",
    questions: int = 40,
    passages: int = 5,
    per_round: int = 8,
    pace_s: float = 0.5,
    model: str = "smollm2",
    recipe: str = "auto",
    dtype: str = "bfloat16",
    memory: str = "6GiB",
    more: str = "",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = resolve_name(model)
    trace = load_trace(corpus, asked, questions + 1, passages, 1.0)
    trace["retrieved"] = [in_whole_pages(path, one) for one in trace["retrieved"]]
    servers = Systems(systems.split(","), path, folder, dtype, recipe, memory, more)
    with servers.running():
        servers.store_passages(trace["retrieved"])
        figures = rows(asyncio.run(measure(servers, trace, per_round, pace_s)))
    result = {"machine": host(), "pace_s": pace_s, "questions": questions, "rows": figures}
    write(output, result, table(figures))
    print(json.dumps(result["machine"]))
    print(table(figures))


if __name__ == "__main__":
    typer.run(main)
