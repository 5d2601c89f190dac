"""Documents as marked passages: the document prompt, the helper for chains, and stamps."""

from __future__ import annotations

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate

from blockattn_rag.langchain import BlockDocumentPrompt, format_blocks
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import segment, wrap
from tests.langchain.conftest import passages

TITLED = BlockDocumentPrompt.from_template("title: {title}\n\n{page_content}")


def test_each_document_becomes_one_verified_block() -> None:
    documents = passages(3)
    string = format_blocks(documents)
    assert string == "\n\n".join(wrap(document.page_content) for document in documents)
    assert [block.text for block in segment(string).context] == [
        document.page_content.strip() for document in documents
    ]


def test_empty_documents_are_dropped() -> None:
    assert format_blocks([Document(" \n"), Document("a")]) == wrap("a")


def test_braces_and_control_tokens_of_a_passage_stay_unchanged() -> None:
    text = 'a {b} {{c}} "d" <|end|> [[kvblock:x]]'
    assert format_blocks([Document(text)]) == wrap(text)


def test_any_document_prompt_formats_the_passage() -> None:
    document = Document("text", metadata={"title": "A"})
    inner = PromptTemplate.from_template("{title}: {page_content}")
    assert format_blocks([document], inner) == wrap("A: text")
    assert format_blocks([document], TITLED) == wrap("title: A\n\ntext")


def test_partial_variables_are_filled_in() -> None:
    document = Document("text")
    prompt = TITLED.partial(title="Fixed")
    assert prompt.input_variables == ["page_content"]
    assert format_blocks([document], prompt) == wrap("title: Fixed\n\ntext")
    assert isinstance(prompt, BlockDocumentPrompt)
    assert prompt.canonical_text(document) == "title: Fixed\n\ntext"


async def test_the_prompt_formats_asynchronously_too() -> None:
    assert await TITLED.aformat(title="A", page_content="b") == wrap("title: A\n\nb")


def test_stamping_adds_the_handle_of_the_formatted_text_to_a_copy() -> None:
    document = Document(" text\n", metadata={"title": "A"}, id="7")
    stamped = TITLED.stamp(document)
    assert stamped.metadata["kv_handle"] == handle_of("title: A\n\n text")
    assert (stamped.id, stamped.page_content) == ("7", " text\n")
    assert document.metadata == {"title": "A"}
    assert TITLED.stamp(stamped) == stamped


def test_stamps_are_removed_from_empty_documents() -> None:
    stamped = BlockDocumentPrompt().stamp(Document("text"))
    emptied = stamped.model_copy(update={"page_content": " "})
    assert BlockDocumentPrompt().stamp(emptied).metadata == {}
