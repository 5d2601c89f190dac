"""Chat model that calls a server, based on LangChain's class for OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

from pydantic import SecretStr

from blockattn_rag.errors import ServingError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.server import ServerClient

try:
    from langchain_openai import ChatOpenAI
except ModuleNotFoundError as error:
    raise ImportError(f"served_llm needs {missing_extra('langchain-openai', 'serving')}") from error


def served_llm(
    url: str, model: str | None = None, *, api_key: str | None = None, **fields: Any
) -> ChatOpenAI:
    """Create a chat model for a server that reuses passages, such as ``blockattn-rag serve``.

    Insert passages into prompts with ``format_blocks``, and encode them with
    ``BlockKVTransformer(server=url)``. ``usage_metadata["input_token_details"]["cache_read"]``
    counts the reused tokens.

    Args:
        url: Address of the server, such as ``"http://gpu:8000"``.
        model: Name of the model on the server. Default: the server's first model.
        api_key: API key of the server. Default: the environment variable ``BLOCKATTN_RAG_API_KEY``.
        fields: Additional fields of ``ChatOpenAI``. Defaults: ``temperature=0``,
            ``max_tokens=256``.

    Raises:
        ServingError: The server is unreachable, lacks this package's connector, or has another
            marker key; or its model has no chat template.
    """
    client = ServerClient(url, api_key)
    client.check_markers()
    if not client.info.has_chat_template:
        raise ServingError(
            f"The model of {client.url} has no chat template, which ChatOpenAI requires; set one "
            "with vLLM's option --chat-template"
        )
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256, "use_responses_api": False}
    return ChatOpenAI(
        model=model or client.info.models[0],
        base_url=client.openai_url,
        api_key=SecretStr(client.openai.api_key),
        **{**defaults, **fields},
    )
