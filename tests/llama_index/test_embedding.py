from __future__ import annotations

import numpy as np
from llama_index.core.schema import TextNode

from blockattn_rag.llama_index import HashingEmbedding


def test_vectors_are_normalized_and_deterministic() -> None:
    texts = ["The otter swims.", "", "...", "Der Otter schwimmt. 漢字"]
    vectors = np.array(HashingEmbedding(256).get_text_embedding_batch(texts))
    assert vectors.shape == (4, 256)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.array_equal(vectors, HashingEmbedding(256).get_text_embedding_batch(texts))


async def test_a_question_is_nearest_to_the_passage_with_its_words() -> None:
    embed = HashingEmbedding()
    texts = ["The otters live in rivers.", "The heron stands in water.", "Where is the newt?"]
    passages = np.array([await embed.aget_text_embedding(text) for text in texts])
    question = np.array(await embed.aget_query_embedding("Where does the otter live?"))
    assert int(np.argmax(passages @ question)) == 0


def test_the_embedding_works_in_pipelines_and_survives_a_dict() -> None:
    embed = HashingEmbedding.from_dict(HashingEmbedding(32).to_dict())
    [node] = embed([TextNode(text="otter")])
    assert len(node.get_embedding()) == 32
