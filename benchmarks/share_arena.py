"""Driver for KVShareArena, a leaderboard of methods that reuse the KV cache of passages.

    git clone https://github.com/xishi404/KVShareArena
    for row in no-context full none fast head+recompute:0.1; do
      python benchmarks/share_arena.py run KVShareArena hotpotqa \\
        --model Qwen/Qwen3-8B --row $row --output runs/$row.json
    done
    python benchmarks/share_arena.py score runs/*.json    # recovered gain, with our references
    kva validate runs/fast.json --data_dir KVShareArena/data/queryset    # the board's check
    kva score runs/fast.json --data_dir KVShareArena/data/queryset       # the board's scorer

Questions, prompts and answer lengths are read from a clone of the board's repository; its code is
not used. ``Method`` implements the three steps of the board's interface, so the board's harness can
also run it: ``kvsharearena.register("block-attention")(Method)``.

A row is a recipe (``blockattn_rag.Recipe``), or one of the references: ``full`` computes the
complete prompt, ``no-context`` omits the sources.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag import Block, BlockAttentionEngine, BlockPrompt
from blockattn_rag.files import write_json
from blockattn_rag.lab.evaluation.metrics import bootstrap_ratio, contains_answer, f1_score
from blockattn_rag.prompts.blocks import Span

SCHEMA = "kva.result.v1"
FULL, NO_CONTEXT = "full", "no-context"
LEAST_GAIN = 1e-3
"""Minimum F1 gain from sources for which the board defines a recovered gain."""

app = typer.Typer(help=__doc__, add_completion=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its costs. The board scores the text.

    Args:
        text: The answer.
        recomputed_layer_tokens: Source tokens that were computed for this answer, times layers.
        dense_payload_layer_tokens: All source tokens, times layers.
        kv_bytes: Size of the sources' keys and values in bytes.
        ttft_ms: Time to first token in milliseconds, with encoded sources.
        aux: Additional counts, for information.
    """

    text: str
    recomputed_layer_tokens: int
    dense_payload_layer_tokens: int
    kv_bytes: int
    ttft_ms: float
    aux: dict[str, Any] = field(default_factory=dict)


class Method:
    """Implements the board's interface: ``setup``, ``build_cache`` per source, ``answer``."""

    name = "block-attention"
    track = frozenset({"re"})  # retrieved evidence
    mechanism_class = 1  # the board's number for recomputation and link tokens
    provenance = "official"
    backend = "blockattn_rag on transformers"
    training_data: str | None = None
    cost_notes = (
        "recomputed_layer_tokens = tokens of sources computed for the answer (recomputed or "
        "promoted ones), times layers; kv_bytes = tokens of sources times bytes per token; "
        "ttft_ms = from the request to the first token, with sources and prompt head encoded"
    )

    def setup(self, model_id: str, config: Mapping[str, Any]) -> None:
        """Load a model.

        Args:
            model_id: Folder, hub id or name of a model.
            config: ``exam`` with ``system_prompt``, ``pre_ctx``, ``mid_q``, ``tail`` and
                ``max_new_tokens``; optionally ``row`` (default: ``auto``) and ``engine``, which is
                used instead of loading a model.
        """
        self.row = str(config.get("row", "auto"))
        recipe = "none" if self.row in (FULL, NO_CONTEXT) else self.row
        self.engine: BlockAttentionEngine = config.get(
            "engine"
        ) or BlockAttentionEngine.from_pretrained(model_id, recipe=recipe)
        self.layers = self.engine.model.hf_model.config.get_text_config().num_hidden_layers

    def build_cache(self, source_text: str) -> Block:
        """Encode a source, without the question."""
        block = Block(source_text)
        if self.row not in (FULL, NO_CONTEXT):
            self.engine.precompute([block])
        return block

    def answer(self, question: str, caches: Sequence[Block], config: Mapping[str, Any]) -> Answer:
        """Answer a question about sources that were encoded with ``build_cache``."""
        exam, tokenizer = config["exam"], self.engine.model.tokenizer
        sources = [] if self.row == NO_CONTEXT else caches
        prompt = self._prompt(question, sources, exam)
        if self.row not in (FULL, NO_CONTEXT):
            # The first block is the prompt's head, not a source.
            self.engine.precompute(prompt.context[:1], as_prompt=True)
        payload = sum(len(tokenizer.block_ids(block, first=False)) for block in sources)
        mode: Any = "full" if self.row in (FULL, NO_CONTEXT) else "block"
        generation = self.engine.generate(
            prompt, mode=mode, max_new_tokens=int(exam["max_new_tokens"])
        )
        stats = generation.stats
        question_tokens = len(tokenizer.prompt_ids(prompt).final)
        computed = payload if mode == "full" else max(0, stats.computed_tokens - question_tokens)
        return Answer(
            generation.text,
            recomputed_layer_tokens=computed * self.layers,
            dense_payload_layer_tokens=payload * self.layers,
            kv_bytes=payload * self.engine.model.bytes_per_token,
            ttft_ms=stats.ttft_s * 1000,
            aux={"payload_tokens": payload, "misses": stats.misses, "recipe": stats.recipe},
        )

    def teardown(self) -> None:
        del self.engine

    def _prompt(
        self, question: str, sources: Sequence[Block], exam: Mapping[str, Any]
    ) -> BlockPrompt:
        """Return a prompt with the head, the sources without separators, and the question."""
        place = f"sources{secrets.token_hex(8)}"
        user = f"{exam['pre_ctx']}{place}{exam['mid_q']}{question}{exam['tail']}"
        messages = [
            {"role": "system", "content": exam["system_prompt"]},
            {"role": "user", "content": user},
        ]
        text: str = self.engine.model.tokenizer.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        head, _, rest = text.partition(place)
        return BlockPrompt((Block.of([Span(head, "prompt")]), *sources), rest)


def read_exam(arena: Path, subset: str) -> dict[str, Any]:
    """Read the prompt of a question set from a clone of the board's repository.

    Raises:
        ValueError: The set is unknown.
    """
    folder = arena / "kvsharearena/assets"
    prompts = json.loads((folder / "prompts.json").read_text("utf-8"))
    forms = json.loads((folder / "longbench_config.json").read_text("utf-8"))
    if subset not in forms["dataset2prompt"]:
        known = ", ".join(sorted(forms["dataset2prompt"]))
        raise ValueError(f"Unknown question set {subset!r}: expected one of {known}.")
    before, _, rest = forms["dataset2prompt"][subset].partition("{context}")
    between, _, after = rest.partition("{input}")
    return {
        "track": "re",
        "subset": subset,
        "prompt_key": "P_c",
        "system_prompt": prompts["P_c"],
        "pre_ctx": before,
        "mid_q": between,
        "tail": after,
        "max_new_tokens": int(forms["dataset2maxlen"][subset]),
    }


def read_questions(arena: Path, subset: str) -> tuple[list[dict[str, Any]], str]:
    """Return the frozen questions of a set, and the SHA-256 digest of their file.

    Raises:
        ValueError: The digest differs from the board's list of checksums.
    """
    folder = arena / "data/queryset"
    path = folder / f"{subset}_n100.jsonl"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = json.loads((folder / "sha256.json").read_text("utf-8")).get(path.name)
    if digest != expected:
        raise ValueError(f"{path} has sha256 {digest}, expected {expected}: clone it again")
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines], digest


def answer_all(
    method: Method, model: str, exam: Mapping[str, Any], questions: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Answer each question with its sources, and return the result in the board's format.

    Args:
        method: Method on which ``setup`` was called.
        model: Model name for the result.
        exam: Output of ``read_exam``.
        questions: Records with ``_id``, ``input``, ``answers`` and ``chunks``.
    """
    rows = []
    for number, asked in enumerate(questions, 1):
        caches = [method.build_cache(text) for text in asked["chunks"]]
        answer = method.answer(asked["input"], caches, {"exam": exam})
        rows.append(
            {
                "_id": asked["_id"],
                "golds": asked["answers"],
                "n_chunks": len(caches),
                "pred": answer.text,
                "f1_raw": f1_score(answer.text, asked["answers"]),
                "contains": contains_answer(answer.text, asked["answers"]),
                "recomputed_layer_tokens": answer.recomputed_layer_tokens,
                "dense_payload_layer_tokens": answer.dense_payload_layer_tokens,
                "kv_bytes": answer.kv_bytes,
                "ttft_ms": answer.ttft_ms,
                "aux": answer.aux,
            }
        )
        print(f"{number} of {len(questions)}: F1 {rows[-1]['f1_raw']:.2f}", flush=True)
    packages = ("blockattn-rag", "torch", "transformers")
    versions = {name: version(name) for name in packages}
    name = f"{method.name} ({method.row})"
    return {
        "schema": SCHEMA,
        "summary": {
            "method": name,
            "track": exam["track"],
            "subset": exam["subset"],
            "model": model,
            "n": len(rows),
            "backend": method.backend,
            "versions": versions,
            "git_rev": None,
            "prompt_key": exam["prompt_key"],
            "max_new_tokens": exam["max_new_tokens"],
            "f1_raw": sum(row["f1_raw"] for row in rows) / len(rows),
        },
        "results": rows,
        "method_card": {
            "name": name,
            "provenance": method.provenance,
            "mechanism_class": method.mechanism_class,
            "backend": method.backend,
            "versions": versions,
            "training_data": method.training_data,
            "cost_notes": method.cost_notes,
        },
    }


def compared(result: Mapping[str, Any], none: Mapping[str, Any], full: Mapping[str, Any]) -> str:
    """Format a table row with F1, recovered gain, and savings relative to the references.

    Recovered gain = (F1 - F1 without sources) / (F1 of the full prompt - F1 without sources), with
    its 95 % interval over questions. Compute saved = 1 - share of source tokens that were computed.
    TTFT saved is relative to the full prompt on the same machine.
    """
    rows, bottom, top = (
        {row["_id"]: row for row in one["results"]} for one in (result, none, full)
    )
    if not rows.keys() == bottom.keys() == top.keys():
        raise ValueError("The results are for different questions: run all rows on the same set")
    scores = [(rows[i]["f1_raw"], bottom[i]["f1_raw"], top[i]["f1_raw"]) for i in sorted(rows)]
    above, gains = [s - b for s, b, _ in scores], [t - b for _, b, t in scores]
    recovered = "undefined"
    if sum(gains) / len(gains) > LEAST_GAIN:
        recovered = "{:+.2f} ({:+.2f} to {:+.2f})".format(*bootstrap_ratio(above, gains))
    total = partial(_total, rows.values())
    dense = total("dense_payload_layer_tokens")
    compute = f"{1 - total('recomputed_layer_tokens') / dense:.1%}" if dense else "-"
    sooner = 1 - total("ttft_ms") / _total(top.values(), "ttft_ms")
    f1 = total("f1_raw") / len(rows)
    name = result["summary"]["method"]
    return f"| {name} | {len(rows)} | {f1:.3f} | {recovered} | {compute} | {sooner:.1%} |"


def _total(rows: Any, name: str) -> float:
    return float(sum(row[name] for row in rows))


Arena = Annotated[Path, typer.Argument(help="Clone of the board's repository.")]


@app.command()
def run(
    arena: Arena,
    subset: Annotated[str, typer.Argument(help="qasper, multifieldqa_en or hotpotqa.")],
    model: Annotated[str, typer.Option(help="Model; the board uses Qwen/Qwen3-8B.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    row: Annotated[str, typer.Option(help="Recipe, full, or no-context.")] = "auto",
    questions: Annotated[int, typer.Option(help="The board requires all 100.")] = 100,
) -> None:
    """Answer the questions of a set for one row."""
    exam = read_exam(arena, subset)
    asked, digest = read_questions(arena, subset)
    method = Method()
    method.setup(model, {"exam": exam, "row": row})
    result = answer_all(method, model, exam, asked[:questions])
    result["summary"]["queryset"] = {"file": f"{subset}_n100.jsonl", "sha256": digest}
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output, result)


@app.command()
def score(
    files: Annotated[list[Path], typer.Argument(help="Results, including full and no-context.")],
) -> None:
    """Print the recovered gain and savings of each result. The rows full and no-context are
    required."""
    results = [json.loads(path.read_text("utf-8")) for path in files]
    by_name = {one["summary"]["method"]: one for one in results}
    names = [f"{Method.name} ({row})" for row in (NO_CONTEXT, FULL)]
    if not by_name.keys() >= set(names):
        raise typer.BadParameter(f"Pass results for the rows {NO_CONTEXT} and {FULL}, too")
    references = [by_name[name] for name in names]
    print("| row | questions | F1 | recovered gain | compute saved | TTFT saved |")
    print("|---|---|---|---|---|---|")
    for result in results:
        print(compared(result, *references))


if __name__ == "__main__":
    app()
