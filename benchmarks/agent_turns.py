"""Count the tokens computed in each turn of an agent, and check that only passages are stored.

    python benchmarks/agent_turns.py [--turns 10] [--passages 20] [--found 3] [--follow-ups 0]

The bundled model answers questions about passages that are retrieved in each turn
(`RetrieveFirst`), and the history grows with every turn. Follow-ups retrieve nothing. `final` is
the length of the final block: all text after the last passage. The last lines of output describe
the store: each entry is decoded, and its text is compared with the passages and the conversation.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.checkpoint.memory import InMemorySaver
from measuring import machine

from blockattn_rag import DirectoryStore
from blockattn_rag.app.demo.corpus import bundled_corpus, bundled_questions
from blockattn_rag.langchain import (
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    RetrieveFirst,
)

FOLLOW_UPS = ("Are you sure?", "Say that again.", "Thank you. What else do you know?")


class NewQuestions(BaseRetriever):
    """Retriever that returns no documents for follow-ups."""

    other: BaseRetriever

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return [] if query in FOLLOW_UPS else self.other.invoke(query)


def main(
    turns: Annotated[int, typer.Option(min=1)] = 10,
    passages: Annotated[int, typer.Option(min=1)] = 20,
    found: Annotated[int, typer.Option(min=1)] = 3,
    follow_ups: Annotated[int, typer.Option(min=0, max=len(FOLLOW_UPS))] = 0,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        chat = ChatBlockAttention(model="bundled", kv_store=folder, max_tokens=48)
        questions = bundled_questions()[:turns]
        corpus, gold = bundled_corpus(), {at for one in questions for at in one.gold}
        others = (at for at in range(len(corpus)) if at not in gold)
        chosen = [*gold, *islice(others, max(0, passages - len(gold)))]
        documents = [Document(corpus[at].text) for at in sorted(chosen)]
        documents = BlockKVTransformer(llm=chat).transform_documents(documents)
        vectors = InMemoryVectorStore(HashingEmbeddings())
        vectors.add_documents(documents)
        retriever = NewQuestions(other=vectors.as_retriever(search_kwargs={"k": found}))
        middleware = [RetrieveFirst(retriever)]
        agent = create_agent(chat, [], middleware=middleware, checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        said: list[str] = []
        asked = [text for one in questions for text in (one.question, *FOLLOW_UPS[:follow_ups])]
        print(f"{'turn':>4} {'prompt':>7} {'final':>7} {'reused':>7} {'computed':>8}")
        for turn, question in enumerate(asked, 1):
            given: Any = {"messages": [("human", question)]}
            *before, answer = agent.invoke(given, config)["messages"]
            final = len(chat.source.tokenizer.prompt_ids(chat.to_prompt(before)).final)
            reuse = answer.response_metadata["block_attention"]
            prompt = answer.usage_metadata["input_tokens"]
            reused, computed = reuse["reused_tokens"], reuse["computed_tokens"]
            print(f"{turn:>4} {prompt:>7} {final:>7} {reused:>7} {computed:>8}", flush=True)
            said += [question, str(answer.content)]
        _tell_of_disk(chat, Path(folder), [one.page_content for one in documents], said)
        print(machine())


def _tell_of_disk(
    chat: ChatBlockAttention, folder: Path, passages: list[str], said: list[str]
) -> None:
    store, decode = DirectoryStore(folder), chat.source.tokenizer.tokenizer.decode
    entries = [kv for key in list(store.keys()) if (kv := store.get(key))]
    texts = [decode(kv.token_ids) for kv in entries]
    known = sum(any(one.strip() in text for one in passages) for text in texts)
    # Skip lines that repeat a passage, because passages are stored.
    own = [line for line in said if not any(line in one for one in passages)]
    files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    in_tokens = sum(any(line in text for text in texts) for line in own)
    in_bytes = sum(any(line.encode() in file for file in files) for line in own)
    print(f"{len(texts)} entries on disk, {known} of them passages")
    print(f"{len(own)} questions and answers that no passage contains:")
    print(f"{in_tokens} of them in the entries' tokens, {in_bytes} in the bytes of the files")


if __name__ == "__main__":
    typer.run(main)
