"""The JSON bodies of the routes of embeddings, scores and ranks."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from slora_api.completions.prompt_fields import PromptFields
from slora_api.completions.schemas import ModelFields, SentPrompt, as_list, check_prompt, list_prompts
from slora_api.http.field_types import Name, RequestModel, Text, make_refusal
from slora_api.http.unsupported import Unsupported


class EmbeddingRequest(PromptFields, ModelFields):
    """POST /v1/embeddings.

    dimensions: how many components of the embedding to keep, by default all. The first components are kept, and then
    normalized.
    encoding_format: `float`, the default, or `base64`: the numbers as little-endian float32, encoded in base64.
    pooling: which hidden states make the embedding. `last` takes the hidden state of the last token, and `mean`
        averages the hidden states of all tokens. The operator sets the default.
    normalize: whether the embedding is divided by its L2 norm; by default, it is. use_activation: vLLM's name for
        `normalize`.
    """

    default_side = "right"

    input: Annotated[SentPrompt, PlainValidator(check_prompt, json_schema_input_type=SentPrompt)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    # vLLM's fields.
    embed_dtype: Annotated[Any, Unsupported("float32")] = None
    endianness: Annotated[Any, Unsupported("native", "little")] = None
    padding: Annotated[Any, Unsupported("do_not_pad")] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None
    request_id: Annotated[Any, Unsupported(instead="The answer has no id.")] = None
    cache_salt: Annotated[Any, Unsupported(instead="Each tenant has a prefix cache of its own.")] = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """One entry for each input of the request."""
        return list_prompts(self.input)

    @property
    def is_normalized(self) -> bool:
        return self.normalize is not False and self.use_activation is not False

    @property
    def is_base64(self) -> bool:
        return self.encoding_format == "base64"

    @model_validator(mode="after")
    def _one_choice_of_norm(self) -> Self:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise make_refusal(
                "`normalize` and `use_activation` contradict each other; send only one of them.",
                param="normalize",
            )
        return self


class ClassifyRequest(PromptFields, ModelFields):
    """POST /v1/classify, with vLLM's fields.

    use_activation: false returns logits instead of probabilities.
    """

    default_side = "right"

    input: Annotated[SentPrompt, PlainValidator(check_prompt, json_schema_input_type=SentPrompt)]
    use_activation: bool | None = None
    padding: Annotated[Any, Unsupported("do_not_pad")] = None
    mm_processor_kwargs: Annotated[Any, Unsupported({})] = None
    request_id: Annotated[Any, Unsupported(instead="The answer has an id of its own.")] = None
    cache_salt: Annotated[Any, Unsupported(instead="Each tenant has a prefix cache of its own.")] = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """One entry for each input of the request."""
        return list_prompts(self.input)


class ScoreFields(PromptFields):
    """The fields that score and rerank share. pooling: as for embeddings. priority, user: as for answers."""

    default_side = "right"

    model: Name
    pooling: Literal["last", "mean"] | None = None
    priority: int | None = None
    user: Name | None = None

    def embedding_request(self, texts: list[str]) -> "EmbeddingRequest":
        """Returns the request for the embeddings that are compared. Its vectors have length 1."""
        return EmbeddingRequest.model_construct(
            model=self.model,
            input=texts,
            pooling=self.pooling,
            add_special_tokens=self.add_special_tokens,
            priority=self.priority,
            user=self.user,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            encoding_format="base64",
        )


class ScoreRequest(ScoreFields):
    """POST /v1/score, with vLLM's fields. The score of two texts is the cosine of their embeddings, or what an
    adapter's head of one label makes of the pair.

    text_1, text_2: two texts; a text and a list of texts, each of which is compared with it; or two lists of the same
    length, which are compared pair by pair.
    """

    text_1: Annotated[list[Text], BeforeValidator(as_list, json_schema_input_type=str | list[str])]
    text_2: Annotated[list[Text], BeforeValidator(as_list, json_schema_input_type=str | list[str])]

    @model_validator(mode="after")
    def _texts_that_can_be_paired(self) -> Self:
        num_first, num_second = len(self.text_1), len(self.text_2)
        if not num_first or not num_second or num_first not in (1, num_second):
            raise make_refusal(
                "`text_1` has {first} texts and `text_2` has {second}; send one text in `text_1`, or as many as in "
                "`text_2`.",
                param="text_1",
                first=num_first,
                second=num_second,
            )
        return self


class DocumentText(RequestModel):
    """A document. text: its text."""

    text: Text


def _read_documents(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{"text": item} if isinstance(item, str) else item for item in value]


class RerankRequest(ScoreFields):
    """POST /v1/rerank, with the fields of vLLM, Cohere and Jina. Documents are ordered by their scores with the query.
    See `ScoreRequest`.

    top_n: how many documents to return; by default, all. return_documents: false leaves the texts out of the answer.
    """

    query: Text
    documents: Annotated[
        list[DocumentText],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_read_documents, json_schema_input_type=list[str | DocumentText]),
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
