"""The options of the ``retriever`` environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from nemorl.base.text.reading import expanded
from nemorl.config import DatasetName
from nemorl.config.component import Component
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl.plugins.kinds import EnvironmentConfig
from pydantic import Field, WithJsonSchema

from nemorl_tasks.environments.config import PART_SCHEMA, ConversationConfig

if TYPE_CHECKING:
    from nemorl.contracts import Environment

GRADER = Component("environments", "exact_match")


class RetrieverConfig(ConversationConfig):
    """A search engine to call: the policy asks for documents, reads the best ones, and answers.

    A response that ends with ``<search>who built it</search>`` is answered with the documents in ``<information>``; any
    other response is final and goes to ``grader``, of a response with ``<answer>…</answer>`` what is in it. Ranking is
    BM25, over a corpus of yours.
    """

    summary: ClassVar[str] = "tool use: the policy searches a corpus with BM25, then answers"
    requires_modules: ClassVar[tuple[str, ...]] = ("bm25s",)
    install_hint: ClassVar[str] = 'pip install "nemorl-tasks[retriever]"'
    metrics: ClassVar[Mapping[str, MetricInfo]] = {
        "train/environment/searches": MetricInfo(
            "Searches", "per episode", "searches of an episode", "a fall to 0: the policy guesses instead", smooth=True
        ),
        "train/environment/empty_searches": MetricInfo(
            "Searches", "per episode", "searches of an episode that found nothing", "growth", smooth=True
        ),
    }

    corpus: DatasetName = Field(min_length=1)
    """A JSONL file with a document per line, a text file, or a folder of such files (``.jsonl``, ``.txt``, ``.md``). It
    is read into memory when the run starts."""
    text_column: str = "text"
    """Column of a JSONL file that holds the document."""
    title_column: str | None = None
    """Column with its title, which is searched and shown too."""
    num_results: int = Field(3, ge=1)
    """Documents that a search returns at most; those without a word of the query are never returned."""
    max_result_chars: int = Field(2000, ge=1)
    """Longer documents are cut where the policy reads them. They are searched as a whole."""
    k1: float = Field(1.5, ge=0)
    """BM25: how fast further occurrences of a word stop counting."""
    b: float = Field(0.75, ge=0, le=1)
    """BM25: how much long documents are held back."""
    max_searches: int = Field(4, ge=0)
    """Searches per episode; one more ends it with reward 0. The algorithm's ``max_turns`` should be one higher."""
    grader: Annotated[EnvironmentConfig, GRADER, WithJsonSchema(PART_SCHEMA)] = Field(
        default=GRADER.default,
        validate_default=True,  # type: ignore[assignment]
    )
    """The scorer of the final answer: an environment of one turn, by name or as a mapping."""
    call_tag: str = Field("search", pattern=r"^\w+$")
    """Element that a search is written in. NeMo RL's is ``retrieve``."""
    result_tag: str = Field("information", pattern=r"^\w+$")
    """Element that the documents are returned in. NeMo RL's is ``result``."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if not expanded(self.corpus).exists():
            yield ConfigIssue("corpus", f"{self.corpus} does not exist", "give a file or folder of documents")

    def build(self) -> Environment:
        from nemorl_tasks.environments.retriever.environment import Retriever

        return Retriever(self)
