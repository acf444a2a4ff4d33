"""Bytes as the client of the package ``tinker`` writes and reads them, against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nemorl.errors import DataError
from nemorl_agents.tinker.errors import ApiError
from nemorl_agents.tinker.models import Passed, Sampled, SampledSequence
from nemorl_agents.tinker.wire.data import pass_body
from nemorl_agents.tinker.wire.outputs import encoded_pass, encoded_samples
from recorded_messages import Raises

tinker = pytest.importorskip("tinker", reason="the package tinker is not installed")
from tinker import types  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import deserialize_proto_response  # noqa: E402


def sent(data: list[Any], loss: Any = "cross_entropy", config: Any = None) -> bytes:
    given = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=3)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def datum(**fields: Any) -> Any:
    chunks = [types.EncodedTextChunk(tokens=[5]), types.EncodedTextChunk(tokens=[6, 7])]
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=fields)


def test_chunks_of_a_prompt_are_joined() -> None:
    body = pass_body(sent([datum(target_tokens=[6, 7, 8], weights=[0.0, 0.5, 1.0])]))
    (found,) = body.data()
    assert (body.model_id, body.seq_id, body.loss_name, body.forward_only) == ("m", 3, "cross_entropy", False)
    assert found.token_ids == (5, 6, 7)
    assert found.fields["target_tokens"].tolist() == [6, 7, 8]
    assert found.fields["weights"].tolist() == [0.0, 0.5, 1.0]
    assert (found.fields["target_tokens"].dtype, found.fields["weights"].dtype) == (torch.int64, torch.float32)


def test_a_sparse_matrix_is_filled_with_zeros() -> None:
    """The client packs a mostly empty [3, 8] into compressed rows by itself."""
    weights = torch.zeros(3, 8)
    weights[0, 2], weights[2, 7] = 0.25, -1.5
    packed = types.TensorData.from_torch_sparse(weights)
    assert packed.sparse_crow_indices == [0, 1, 1, 2]
    (found,) = pass_body(sent([datum(target_tokens=[6, 7, 8], weights=packed)])).data()
    assert torch.equal(found.fields["weights"], weights)


def test_numbers_and_texts_of_a_loss_arrive() -> None:
    body = pass_body(sent([datum(target_tokens=[6, 7, 8])], "ppo", {"clip_low_threshold": 0.7, "mode": "token"}))
    assert body.loss_config == {"clip_low_threshold": 0.7, "mode": "token"}


def test_what_does_not_fit_is_named(raises: Raises) -> None:
    with raises(DataError, "data[1].weights", 2, 3):
        pass_body(sent([datum(target_tokens=[6, 7, 8]), datum(weights=[1.0, 2.0])])).data()
    image = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    with raises(DataError, "data[0]", "image"):
        pass_body(sent([types.Datum(model_input=image, loss_fn_inputs={})])).data()
    with raises(DataError, "data[0]"):
        pass_body(sent([types.Datum(model_input=types.ModelInput.from_ints([]), loss_fn_inputs={})])).data()
    with raises(ApiError):
        pass_body(b"\xff\xff\xff")


@pytest.mark.parametrize("column", [-1, 8])
def test_indices_outside_a_sparse_matrix_are_refused(column: int, raises: Raises) -> None:
    packed = types.TensorData(
        data=[1.0], dtype="float32", shape=[3, 8], sparse_crow_indices=[0, 1, 1, 1], sparse_col_indices=[column]
    )
    with raises(DataError, "data[0].weights"):
        pass_body(sent([datum(weights=packed)])).data()


def test_logprobs_of_any_lengths_and_widths_come_back() -> None:
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0]), torch.tensor([[-4.0, -5.0], [-6.0, -7.0]])]
    raw = encoded_pass(Passed(logprobs, {"loss:sum": 1.5}))
    found: Any = deserialize_proto_response(raw, types.ForwardBackwardOutput)
    assert found.metrics == {"loss:sum": 1.5}
    assert [each["logprobs"].shape for each in found.loss_fn_outputs] == [[2], [1], [2, 2]]
    assert [each["logprobs"].tolist() for each in found.loss_fn_outputs] == [each.tolist() for each in logprobs]


def test_samples_come_back() -> None:
    sequences = [
        SampledSequence([4, 0], [-0.5, -0.25], "stop", [[(4, -0.5), (9, -1.0)], [(0, -0.25)]]),
        SampledSequence([], [], "length"),
    ]
    prompt = [math.nan, -3.0]
    sampled = Sampled(sequences, prompt, [None, [(7, -0.1)]], prompt_cache_hit_tokens=1)
    found: Any = deserialize_proto_response(encoded_samples(sampled), types.SampleResponse)
    assert [each.tokens for each in found.sequences] == [[4, 0], []]
    assert [each.stop_reason for each in found.sequences] == ["stop", "length"]
    assert found.sequences[0].logprobs == [-0.5, -0.25]
    assert found.sequences[0].topk_logprobs == [[(4, -0.5), (9, -1.0)], [(0, -0.25)]]
    assert found.prompt_logprobs == [None, -3.0]
    assert [row and row[0][0] for row in found.topk_prompt_logprobs] == [None, 7]
    assert found.prompt_cache_hit_tokens == 1
