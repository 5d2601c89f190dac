"""``calibrate``: from a database to settings that its questions use, through a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockattn_rag.cli import certificates
from blockattn_rag.demo.corpus import bundled_corpus
from blockattn_rag.engine.calibration import read_calibrations
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.option_files import merge_digest
from blockattn_rag.errors import DataError
from blockattn_rag.evaluation.calibration import settings
from blockattn_rag.evaluation.calibration.settings import Setting
from blockattn_rag.model.reader import Reader
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.rag.ask import Assistant
from blockattn_rag.rag.database import Database, require_manifest
from blockattn_rag.rag.passages import retriever
from blockattn_rag.rag.prompts import prompt_maker
from blockattn_rag.training.distillation.asked import write_asked
from tests.cli.conftest import Command
from tests.engine.test_calibration import merge_of
from tests.holding import LONGEST_S
from tests.models import tiny_model, tiny_tokenizer

QUESTIONS = 6


@pytest.fixture(autouse=True)
def few_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of the context in place of all, for speed."""
    few = partial(settings.stages, merges=settings.MERGES[:1])
    monkeypatch.setattr(f"{settings.__name__}.stages", few)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A log of questions, one of them twice."""
    asked = [f"How tall is {passage.title}?" for passage in bundled_corpus()[:QUESTIONS]]
    path = tmp_path / "log.jsonl"
    lines = [*asked, asked[0].upper()]
    path.write_text("".join(json.dumps({"question": one, "user": 7}) + "\n" for one in lines))
    return path


def ingested(cli: Command, folder: Path, model: object, count: int = 4) -> Path:
    """A database of some of the demo's passages."""
    texts = folder / "texts"
    texts.mkdir()
    for number, passage in enumerate(bundled_corpus()[:count]):
        text = f"title: {passage.title}\n\n{passage.text}"
        (texts / f"{number}.txt").write_text(text, encoding="utf-8")
    output = cli("ingest", texts, "--db", folder / "db", "--model", model)
    assert output.status == 0, output.stderr
    return folder / "db"


def command(db: Path, questions: Path, *options: object) -> list[object]:
    numbers = ("--passages", 2, "--max-new-tokens", 3, "--promote", 1)
    return ["calibrate", "--db", db, "--questions", questions, *numbers, *options]


def test_the_bundled_model_is_calibrated_through_a_kill_and_asked_with_what_was_chosen(
    cli: Command, tmp_path: Path, questions: Path
) -> None:
    db = ingested(cli, tmp_path, "bundled")
    asked = [str(word) for word in command(db, questions, "--keep-records", "--json")]
    before = _records_before_a_kill(asked, db)
    report = cli(*asked)
    assert report.status == 0, report.stderr
    found = report.json
    (records,) = db.glob("calibrate-*.work/records.jsonl")
    assert records.read_bytes().startswith(before)
    assert found["chosen_on"] == 3
    (certificate,) = found["certificates"]
    assert (certificate["passages"], certificate["questions"]) == (2, 3)
    assert found["qualified"] is False  # three answers of three tokens prove little
    (kept,) = read_calibrations(db / "calibration.json").values()
    assert kept.settings == found["settings"]
    assert found["path"] == str(db / "calibration.json")

    engine = Database.open(db).local_engine
    assert engine.calibration == kept
    assert {name: getattr(engine.defaults, name) for name in kept.settings} == kept.settings
    assert require_manifest(db).sink == kept.settings["sink"]
    ask = ("ask", "How tall is Halden Tower?", "--db", db, "--top-k", 2, "--max-new-tokens", 2)
    answer = cli(*ask, "--json").json
    assert answer["certificate"] == certificate
    shown = cli(*ask).stdout.splitlines()[-1]
    assert shown.startswith("calibrated with 2 passages: agreement with full mode ")
    assert cli("ask", *ask[1:5], 3, *ask[6:], "--json").json["certificate"] is None


def _records_before_a_kill(arguments: list[str], db: Path) -> bytes:
    """The whole lines of a run that was killed after some of its comparisons."""
    code = "from blockattn_rag.cli.app import main; main()"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 6 * LONGEST_S
    data = b""
    while data.count(b"\n") < 8:
        assert running.poll() is None, "it ended before it was killed"
        assert time.monotonic() < until
        time.sleep(0.02)
        files = list(db.glob("calibrate-*.work/records.jsonl"))
        data = files[0].read_bytes() if files else b""
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (db / "calibration.json").exists()
    return data[: data.rfind(b"\n") + 1]


@pytest.fixture
def db(cli: Command, tmp_path: Path, model: Path) -> Path:
    """A database of a tiny model."""
    return ingested(cli, tmp_path, model)


def test_the_tables_tell_what_was_compared_and_what_to_do_next(
    cli: Command, db: Path, questions: Path
) -> None:
    output = cli(*command(db, questions))
    assert output.status == 0, output.stderr
    shown = " ".join(output.stdout.split())
    assert "of them on all 3 questions. The best:" in shown
    assert "Certified on other questions:" in shown
    assert "the simplest within one standard error of the best" in shown
    reason = "it did not reach the targets (agreement 90.0 %, lower bounds)"
    assert f"It does not qualify: {reason}. Next: " in shown
    assert f"`blockattn-rag adapt --model {require_manifest(db).model} --passages {db}" in shown
    assert "note: 6 distinct questions in place of 100" in output.stderr
    assert not list(db.glob("calibrate-*"))  # all went well
    again = cli(*command(db, questions, "--agreement", 0))
    assert "It reaches the targets." in again.stdout


def test_the_reader_that_is_suggested_is_trained_on_what_was_chosen() -> None:
    files = ("/my kv/correction.safetensors", "m.safetensors")
    chosen = Setting("head:4", *files, promote="1")
    report: Any = SimpleNamespace(
        calibration=SimpleNamespace(reason="why", digests={"merge": "1"}, certificates=()),
        choice=SimpleNamespace(setting=chosen),
        finalists=[(chosen, 0.1, 0.01)],
    )
    told = certificates._next_steps(report, Path("db"), "some/model")
    files_given = "--correction '/my kv/correction.safetensors' --merge m.safetensors"
    adapt = f"adapt --model some/model --passages db --sink head:4 {files_given} --output READER`"
    assert adapt in told
    assert f"(`--reader READER {files_given}`)" in told


def test_another_model_is_calibrated_beside_the_first_and_keeps_its_own_sink(
    cli: Command, db: Path, questions: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    before = require_manifest(db)
    second = cli(*command(db, questions, "--model", other, "--json")).json
    assert require_manifest(db) == before  # it is still the first one's
    assert Database.open(db).local_engine.calibration is None
    engine = Database.open(db, model=str(other)).engine
    assert engine.defaults.sink == second["settings"]["sink"]
    first = cli(*command(db, questions, "--json")).json
    known = read_calibrations(db / "calibration.json")
    assert known.keys() == {first["fingerprint"], second["fingerprint"]}
    assert require_manifest(db).sink == first["settings"]["sink"]
    # A later ingestion by the other model takes what was chosen for it.
    assert cli("ingest", tmp_path / "texts", "--db", db, "--model", other).status == 0
    assert require_manifest(db).sink == second["settings"]["sink"]


def test_a_tenants_calibration_is_found_with_his_namespace(
    cli: Command, db: Path, questions: Path, tmp_path: Path
) -> None:
    tenant = ("--namespace", "customer-17")
    assert cli("ingest", tmp_path / "texts", "--db", db, *tenant).status == 0
    assert cli(*command(db, questions)).status == 0
    engine = Database.open(db).local_engine
    assert engine.calibration is not None
    assert engine.calibration.namespace == "customer-17"
    path = db / "calibration.json"
    assert BlockAttentionEngine(engine.model, engine.store, calibration=path).calibration is None


def test_a_sink_given_at_ingestion_later_holds(
    cli: Command, db: Path, questions: Path, tmp_path: Path
) -> None:
    cli(*command(db, questions))
    for sink in ("head:3", "none"):
        output = cli("ingest", tmp_path / "texts", "--db", db, "--sink", sink, "--json")
        assert output.json["sink"] == sink
        assert Database.open(db).engine.defaults.sink == sink


def test_a_changed_sink_is_noted_in_the_manifest_and_told(
    cli: Command, db: Path, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{settings.__name__}.SINKS", ("head:2",))
    # Without plain block mode in reach, the sink wins.
    simplest = "blockattn_rag.evaluation.calibration.search.simplest"
    monkeypatch.setattr(simplest, lambda found: next(s for s in found if s.mode == "sink=head:2"))
    output = cli(*command(db, questions))
    assert output.status == 0, output.stderr
    assert "encoded after 'head:2' when they are first used" in output.stderr
    assert require_manifest(db).sink == "head:2"


def test_a_reader_is_tried_and_noted_with_its_digest(
    cli: Command, db: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Database.open(db).local_engine.model
    reader = Reader.new(model.hf_model, rank=2, seed=1)
    reader.save(tmp_path / "reader", {"fingerprint": model.fingerprint})
    monkeypatch.chdir(tmp_path)
    mode = f"reader={tmp_path / 'reader'}"
    simplest = "blockattn_rag.evaluation.calibration.search.simplest"
    monkeypatch.setattr(simplest, lambda found: next(s for s in found if s.mode.endswith(mode)))
    found = cli(*command(db, questions, "--reader", "reader", "--json")).json
    assert found["settings"]["reader"] == str(tmp_path / "reader")
    assert found["digests"] == {"reader": reader.digest}
    assert Database.open(db).engine.defaults.reader == str(tmp_path / "reader")


@pytest.mark.parametrize("told", [3, 5])
def test_questions_that_a_reader_was_trained_on_do_not_certify_it_while_there_are_others(
    cli: Command, db: Path, questions: Path, tmp_path: Path, told: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = Database.open(db).local_engine.model
    Reader.new(model.hf_model, rank=2).save(tmp_path / "r", {"fingerprint": model.fingerprint})
    asked = sorted(
        {json.loads(line)["question"].lower() for line in questions.read_text().splitlines()}
    )
    write_asked(tmp_path / "r", asked[:told])
    halves: list[list[str]] = []

    def noting(_: Any, choose: Any, certify: Any, *__: Any, **___: Any) -> Any:
        halves.extend([pair.question.lower() for pair in half] for half in (choose, certify))
        raise DataError("enough")

    monkeypatch.setattr("blockattn_rag.evaluation.calibration.run.calibrate", noting)
    output = cli(*command(db, questions, "--reader", tmp_path / "r"))
    assert set(halves[0]) <= set(asked[:told])
    assert len(set(halves[1]) & set(asked[:told])) == told - 3
    assert ("2 of 3 questions to certify on" in output.stderr) == (told == 5)


def test_a_choice_that_was_made_with_the_questions_does_not_qualify_in_any_output(
    cli: Command, db: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Database.open(db).local_engine.model
    Reader.new(model.hf_model, rank=2).save(tmp_path / "r", {"fingerprint": model.fingerprint})
    lines = questions.read_text().splitlines()
    write_asked(tmp_path / "r", [json.loads(line)["question"] for line in lines])
    simplest = "blockattn_rag.evaluation.calibration.search.simplest"
    monkeypatch.setattr(simplest, lambda found: next(s for s in found if s.reader != "none"))
    asking = command(db, questions, "--reader", tmp_path / "r", "--agreement", 0)
    found = cli(*asking, "--json").json
    reason = found["reason"]
    assert reason.startswith("3 of the 3 questions")
    assert "6 more that are not (--questions)" in reason
    assert (found["qualified"], found["certificates"][0]["qualified"]) == (False, False)
    (entry,) = json.loads((db / "calibration.json").read_text())["calibrations"].values()
    assert (entry["qualified"], entry["reason"]) == (False, reason)
    output = cli(*asking)
    assert f"It does not qualify: {reason}." in " ".join(output.stdout.split())
    assert "It reaches the targets" not in output.stdout
    assert "Give 6 more that are not (--questions FILE)" in " ".join(output.stderr.split())


def test_a_learned_merge_is_tried_and_another_in_its_file_is_another_run(
    cli: Command, db: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Database.open(db).local_engine.model
    path = tmp_path / "merge.safetensors"
    merge_of(model, path, {"sink": "head:3", "correction": "none"})
    monkeypatch.chdir(tmp_path)
    own = f"sink=head:3+merge={path}"
    simplest = "blockattn_rag.evaluation.calibration.search.simplest"
    monkeypatch.setattr(simplest, lambda found: next(s for s in found if s.mode == own))
    given = ("--merge", path.name, "--keep-records")
    report = cli(*command(db, questions, *given, "--json"))
    assert report.status == 0, report.stderr
    assert report.json["chosen"] == own
    assert report.json["digests"] == {"merge": merge_digest(str(path))}
    assert Database.open(db).local_engine.defaults.merge == str(path)
    merge_of(model, path, bias=0.2)
    output = cli(*command(db, questions, *given))
    assert "records made with other settings" in " ".join(output.stderr.split())


def test_the_sink_that_a_model_was_fine_tuned_with_is_tried(
    cli: Command, questions: Path, tmp_path: Path
) -> None:
    tuned = tiny_model()
    tuned.config.block_attention = {"sink": "head:3"}
    tuned.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    db = ingested(cli, tmp_path, tmp_path / "model")
    report = cli(*command(db, questions, "--json", "--promote", 0, "--keep-records"))
    assert report.status == 0, report.stderr
    (records,) = db.glob("calibrate-*.work/records.jsonl")
    assert '"sink=head:3"' in records.read_text()


def test_a_model_with_a_sliding_window_is_calibrated_by_what_it_can_use(
    cli: Command, questions: Path, tmp_path: Path
) -> None:
    tiny_model("mistral", sliding_window=16).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    db = ingested(cli, tmp_path, tmp_path / "model")
    report = cli(*command(db, questions, "--json"))
    assert report.status == 0, report.stderr
    tried = {one["mode"].rpartition("+")[2] for one in report.json["finalists"]}
    assert "promote=1" in tried
    assert not [mode for mode in tried if mode.startswith(("merge=", "promote=attention"))]
    output = cli(*command(db, questions, "--merge", tmp_path / "m.safetensors"))
    assert (output.status, "refuses merges" in output.stderr) == (1, True)


def test_a_database_whose_store_is_no_folder_keeps_its_calibration_and_is_asked_with_it(
    cli: Command, db: Path, questions: Path, tmp_path: Path, s3: str
) -> None:
    assert cli("ingest", tmp_path / "texts", "--db", db, "--store", s3).status == 0
    report = cli(*command(db, questions, "--json"))
    assert report.status == 0, report.stderr
    ask = ("ask", "How tall?", "--db", db, "--top-k", 2, "--max-new-tokens", 2, "--json")
    assert cli(*ask).json["certificate"] == report.json["certificates"][0]


def test_an_output_of_ones_own_changes_nothing_in_the_database(
    cli: Command, db: Path, questions: Path, tmp_path: Path
) -> None:
    before = require_manifest(db)
    path = tmp_path / "calibration.json"
    found = cli(*command(db, questions, "--output", path, "--json")).json
    assert read_calibrations(path).keys() == {found["fingerprint"]}
    assert not (db / "calibration.json").exists()
    assert require_manifest(db) == before


def test_an_output_that_holds_something_else_is_refused_before_anything_is_asked(
    cli: Command, db: Path, questions: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"my": "notes"}')
    found = cli(*command(db, questions, "--output", path))
    assert found.status == 1
    assert "of version None, expected 1" in found.stderr
    assert not list(db.glob("*.work"))
    assert path.read_text() == '{"my": "notes"}'


def test_pairs_are_what_ask_retrieves_and_shows_the_model(
    db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database.open(db)
    question = "How tall is Halden Tower?"
    asked: list[BlockPrompt] = []
    stream = database.engine.stream

    def noting(prompt: Any, **options: Any) -> Any:
        asked.append(prompt)
        return stream(prompt, **options)

    monkeypatch.setattr(database.engine, "stream", noting)
    Assistant(database, top_k=3, max_new_tokens=1).ask(question)
    found = retriever(database)(question, 3)
    assert [prompt_maker(database)(question, found)] == asked


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"question": "One?"}'], "found 1 distinct question, expected at least 4"),
        (['{"question": "One?"}', "{"], "line 2: found no valid JSON"),
        (['{"answer": "One."}'], "line 1: found no 'question'"),
    ],
)
def test_questions_that_cannot_be_used_are_refused(
    cli: Command, db: Path, tmp_path: Path, lines: list[str], message: str
) -> None:
    log = tmp_path / "bad.jsonl"
    log.write_text("\n".join(lines))
    output = cli(*command(db, log))
    assert output.status == 1
    assert message in output.stderr


def test_a_model_that_writes_no_question_is_told_of(cli: Command, db: Path) -> None:
    output = cli("calibrate", "--db", db, "--pairs", 4)
    assert output.status == 1
    assert "give questions (--questions FILE)" in output.stderr


def test_prompts_that_do_not_fit_are_left_out_and_told(
    cli: Command, db: Path, questions: Path
) -> None:
    output = cli(*command(db, questions, "--max-new-tokens", 4000))
    assert output.status == 1
    assert "left out: 3 prompts longer than the model's context window" in output.stderr
    assert "found 0 pairs to choose on" in output.stderr


def test_overwriting_starts_again(cli: Command, db: Path, questions: Path) -> None:
    assert cli(*command(db, questions, "--keep-records")).status == 0
    (work,) = db.glob("calibrate-*.work")
    assert [path.name for path in work.iterdir() if path.is_dir()] == []  # no blocks are kept
    changed = command(db, questions, "--max-new-tokens", 2)
    refused = " ".join(cli(*changed).stderr.split())
    assert "records made with other settings" in refused
    assert "--overwrite starts anew" in refused
    assert cli(*changed, "--overwrite").status == 0
