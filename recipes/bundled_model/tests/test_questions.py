from __future__ import annotations

from pathlib import Path

import typer
from typer.testing import CliRunner

from blockattn_rag.lab.evaluation.datasets import read_samples
from recipes.bundled_model import corpus, questions


def test_questions_are_those_of_the_corpus_as_eval_reads_them(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(questions.main)
    file = tmp_path / "order.jsonl"
    options = ["--kind", "order", "--passages", "3", "--samples", "4", "--seed", "5"]
    told = CliRunner().invoke(app, [str(file), *options, "--split", "train"])
    assert told.exit_code == 0, told.output
    drawn = corpus.generate_samples(5, "train", "order", 3, 4)
    assert [sample.question for sample in read_samples(file)] == [one.question for one in drawn]
    assert [len(sample.passages) for sample in read_samples(file)] == [3] * 4
