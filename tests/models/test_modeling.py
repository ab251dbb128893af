"""The model as a function: loss, masks, documents, checkpointing, dtypes, saving."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import sdm
from helpers import assert_close, assert_identical
from same_slots import on_the_same_slots
from tiny_models import STACKS, VOCABULARY, tiny_config, tiny_model, tokens


@pytest.fixture(params=STACKS)
def model(request: pytest.FixtureRequest) -> sdm.SDMForCausalLM:
    return tiny_model(request.param)


def test_is_causal(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 17)
    changed = ids.clone()
    changed[:, 11] = (ids[:, 11] + 1) % VOCABULARY
    before, after = model(ids).logits, model(changed).logits
    assert_close([after[:, :11]], [before[:, :11]], 1e-5)
    assert (after[:, 11:] - before[:, 11:]).abs().amax(-1).min() > 1e-4, "every later token sees the change"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: sdm.SDMForCausalLM, side: str) -> None:
    lengths = [13, 4, 1]
    rows = [tokens(1, length) for length in lengths]
    padded, mask = torch.zeros(3, 13, dtype=torch.long), torch.zeros(3, 13, dtype=torch.long)
    places = [slice(13 - n, 13) if side == "left" else slice(0, n) for n in lengths]
    for row, place, ids in zip(range(3), places, rows, strict=True):
        padded[row, place], mask[row, place] = ids, 1
    logits = model(padded, attention_mask=mask).logits
    for row, place, ids in zip(range(3), places, rows, strict=True):
        assert_close([logits[row : row + 1, place]], [model(ids).logits], 1e-5)


def test_packed_documents_are_apart(model: sdm.SDMForCausalLM) -> None:
    lengths = [5, 1, 9]
    documents = [tokens(1, length) for length in lengths]
    packed = torch.cat(documents, dim=1)
    bounds = torch.tensor([0, 5, 6, 15])
    output = model(packed, labels=packed, cu_seqlens=bounds, logits_to_keep=packed.shape[1])
    assert_close(output.logits.split(lengths, dim=1), [model(ids).logits for ids in documents], 1e-5)
    total = sum(model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in documents if ids.shape[1] > 1)
    assert_close([output.loss], [total / (15 - 3)], 1e-5)
    # transformers tells packed documents apart by positions that start anew.
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    assert_close([model(packed, position_ids=positions).logits], [output.logits], 1e-6)
    assert_close([model(packed, position_ids=positions, labels=packed).loss], [output.loss], 1e-6)
    with torch.no_grad():
        assert_close([model(packed, position_ids=positions).logits], [output.logits], 1e-6)
    with pytest.raises(ValueError, match="position_ids"):
        model(packed.repeat(2, 1), position_ids=positions.repeat(2, 1))


def test_loss_is_that_of_the_logits(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert_close([model(ids, labels=labels).loss], [expected], 1e-6)


def test_targets_that_are_shifted_already() -> None:
    """As context-parallel training gives them: the last token of a piece has a target too."""
    model, ids, targets = tiny_model(), tokens(2, 12), tokens(2, 12)
    expected = F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())
    assert_close([model(ids, labels=ids, shift_labels=targets).loss], [expected], 1e-6)
    assert_close([model(ids, shift_labels=targets).loss], [expected], 1e-6)
    with pytest.raises(ValueError, match="shift_labels must be"):
        model(ids, shift_labels=targets[:, 1:])


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64])
def test_chunked_loss_and_gradients(chunk_size: int) -> None:
    whole = tiny_model(loss_chunk_size=None)
    chunked = tiny_model(loss_chunk_size=chunk_size)
    chunked.load_state_dict(whole.state_dict())
    ids = tokens(2, 12)
    expected, actual = whole(ids, labels=ids), chunked(ids, labels=ids)
    assert expected.logits is not None
    assert actual.logits is None, "asked for with logits_to_keep"
    with torch.no_grad():
        assert_close([chunked(ids, labels=ids).logits], [expected.logits], 1e-5)
        assert chunked(ids, labels=ids, skip_logits=True).logits is None
    expected.loss.backward()
    actual.loss.backward()
    gradients = [[x.grad for x in m.parameters()] for m in (chunked, whole)]
    assert_close([actual.loss, *gradients[0]], [expected.loss, *gradients[1]], 1e-5)


def test_chunked_loss_never_holds_all_logits() -> None:
    """With a large vocabulary the largest tensor of forward and backward is a chunk's logits."""
    model = tiny_model("full_attention", vocab_size=5000, loss_chunk_size=16)
    ids = tokens(1, 256)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Watch():
        model(ids, labels=ids).loss.backward()
    assert max(sizes) <= 5000 * 32, "the output projection's gradient is the largest tensor"


def test_loss_divides_by_num_items_in_batch() -> None:
    model, ids = tiny_model(), tokens(2, 9)
    mean = model(ids, labels=ids).loss
    assert_close([model(ids, labels=ids, num_items_in_batch=torch.tensor(64)).loss], [mean * 16 / 64], 1e-6)


def test_a_batch_without_labels_has_zero_loss_and_gradients() -> None:
    model, ids = tiny_model(), tokens(2, 9)
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss == 0


def test_logits_to_keep() -> None:
    model, ids = tiny_model(), tokens(2, 9)
    logits = model(ids).logits
    assert_close([model(ids, logits_to_keep=2).logits], [logits[:, -2:]], 1e-6)
    assert_close([model(ids, logits_to_keep=torch.tensor([0, 4])).logits], [logits[:, [0, 4]]], 1e-6)


def test_hidden_states_and_embeddings() -> None:
    model, ids = tiny_model(), tokens(2, 9)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == 5
    assert_identical([model.lm_head(output.hidden_states[-1])], [output.logits])
    assert_identical([model(inputs_embeds=model.get_input_embeddings()(ids)).logits], [output.logits])
    assert isinstance(model(ids, return_dict=False), tuple)


def test_gradient_checkpointing_changes_no_gradient(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 12)
    model.train()
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([x.grad.clone() for x in model.parameters()])
    assert_close(gradients[1], gradients[0], 1e-5)


def test_save_and_load(model: sdm.SDMForCausalLM, tmp_path: Path) -> None:
    ids = tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, sdm.SDMForCausalLM)
    assert_identical([loaded(ids).logits], [model(ids).logits])
    assert isinstance(AutoConfig.from_pretrained(tmp_path), sdm.SDMConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path), sdm.SDMModel)


def test_loading_keeps_what_is_there_and_draws_what_is_missing(tmp_path: Path) -> None:
    """A model without a learned M0 is continued with one: its gates must survive."""
    model = tiny_model(learned_initial_state=False)
    model.save_pretrained(tmp_path)
    loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path, learned_initial_state=True)
    before, after = model.model.layers[3].mixer, loaded.model.layers[3].mixer
    assert_identical([after.decay_bias, after.decay_log_rate], [before.decay_bias, before.decay_log_rate])
    assert 0.1 < after.initial_state.std() < 0.3


def test_tied_embeddings(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = tokens(1, 5)
    assert_identical([loaded(ids).logits], [model(ids).logits])


def test_initialisation_is_reproducible() -> None:
    torch.manual_seed(3)
    first = tiny_model().state_dict()
    torch.manual_seed(3)
    second = tiny_model().state_dict()
    assert_identical(list(first.values()), list(second.values()))
    assert abs(float(first["lm_head.weight"].std()) - 0.15) < 0.01


def rounding(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error in units of bfloat16."""
    error = (actual.float() - expected).norm() / expected.norm()
    return float(error.detach()) / torch.finfo(torch.bfloat16).eps


def test_bfloat16_is_float32_rounded(model: sdm.SDMForCausalLM) -> None:
    """From the same rounded weights. Eight sublayers and the head add their errors: one and a half units each."""
    low, ids = model.to(torch.bfloat16), tokens(2, 12)
    exact = copy.deepcopy(low).float()
    actual, expected = on_the_same_slots(lambda: low(ids).logits, lambda: exact(ids).logits)
    assert actual.dtype == torch.bfloat16
    assert rounding(actual, expected) < 13


@pytest.mark.parametrize("stack", ["sdm", "mixed", "mamba2", "pkm", "full_attention"])
def test_autocast_trains(stack: str) -> None:
    """With the gradients of float32, but for the rounding of forward and backward."""
    model, ids = tiny_model(stack), tokens(2, 12)

    def gradients(low: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model(ids, labels=ids).loss
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    actual, expected = on_the_same_slots(lambda: gradients(True), lambda: gradients(False))
    assert 0 < rounding(actual, expected) < 26


def test_a_few_steps_reduce_the_loss(model: sdm.SDMForCausalLM) -> None:
    ids = tokens(2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_no_weight_decay_names_vectors_and_initial_states() -> None:
    model = tiny_model("all_recurrent")
    names = model.no_weight_decay()
    assert {"model.norm.weight", "model.layers.0.mixer.decay_bias", "model.layers.0.mixer.initial_state"} <= names
    assert "lm_head.weight" not in names
    assert "model.layers.0.mixer.value_proj.weight" not in names


def test_compiled_model_agrees() -> None:
    model, ids = (
        tiny_model(num_hidden_layers=2, layer_types=["sliding_attention", "sdm"], global_layer=None),
        tokens(2, 12),
    )
    expected = model(ids).logits
    compiled = torch.compile(model, backend="aot_eager")
    assert_close([compiled(ids).logits], [expected], 1e-5)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    assert_close([compiled(ids, position_ids=positions).logits], [expected], 1e-5)
    with pytest.raises(RuntimeError, match="pass cu_seqlens"):
        compiled(ids, position_ids=positions % 3)
    compiled(ids, labels=ids).loss.backward()


def test_nothing_to_do(model: sdm.SDMForCausalLM) -> None:
    for shape in ((0, 5), (2, 0)):
        ids = torch.zeros(shape, dtype=torch.long)
        assert model(ids).logits.shape == (*shape, VOCABULARY)
        assert model(ids, labels=ids).loss == 0


def test_float64_loss() -> None:
    model, ids = tiny_model().double(), tokens(1, 6)
    expected = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert model(ids, labels=ids).loss.dtype == torch.float64
    assert_close([model(ids, labels=ids).loss], [expected], 1e-12)


def test_new_norms_of_an_old_checkpoint_are_initialised(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path, query_batch_norm=True)
    norm = loaded.model.layers[3].mixer.query_batch_norm
    assert norm.weight.eq(1).all()
    assert norm.bias.eq(0).all()
    assert norm.running_mean.eq(0).all()
    assert norm.running_var.eq(1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("stack", ["mixed", "pkm", "mamba2", "all_recurrent", "linear_attention", "shifted"])
def test_an_exported_program_takes_any_length(stack: str) -> None:
    model = tiny_model(stack)
    lengths = {"input_ids": {1: torch.export.Dim("T", min=2, max=256)}, "use_cache": None}
    program = torch.export.export(
        model, (tokens(2, 9),), {"use_cache": False}, dynamic_shapes=lengths, strict=False
    ).module()
    for length in (2, 9, 64, 150):
        ids = tokens(2, length)
        with torch.no_grad():
            assert_close([program(ids, use_cache=False).logits], [model(ids, use_cache=False).logits], 1e-5)


class TestBadInput:
    def test_tokens_outside_the_vocabulary(self) -> None:
        for bad in (VOCABULARY, -1):
            with pytest.raises(ValueError, match=f"input_ids .*{VOCABULARY - 1}.*{bad}"):
                tiny_model()(torch.tensor([[0, bad]]))

    def test_longer_than_the_limit(self, caplog: pytest.LogCaptureFixture) -> None:
        """As transformers' own models without learned positions: one warning, and the model continues."""
        model, ids = tiny_model(max_position_embeddings=8), tokens(1, 12)
        model(ids[:, :8])
        assert not caplog.records
        logits = model(ids).logits
        model(tokens(1, 9))
        generated = model.generate(ids[:, :6], max_new_tokens=5, do_sample=False)
        ours = [record.getMessage() for record in caplog.records if record.name.startswith("sdm")]
        assert len(ours) == 1
        assert "a stream of 12 tokens exceeds max_position_embeddings = 8; the model continues" in ours[0]
        model.config.max_position_embeddings = None
        assert_identical([model(ids).logits], [logits])
        assert_identical([model.generate(ids[:, :6], max_new_tokens=5, do_sample=False)], [generated])

    def test_wrong_shapes_and_types(self) -> None:
        model, ids = tiny_model(), tokens(2, 6)
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=torch.ones(2, 5))
        with pytest.raises(ValueError, match="labels"):
            model(ids, labels=ids[:, :5])
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        with pytest.raises(TypeError, match="past_key_values"):
            model(ids, past_key_values=object())
        with pytest.raises(TypeError, match="no argument 'attention_msk'"):
            model(ids, attention_msk=None)
        with pytest.raises(ValueError, match="position_ids"):
            model(ids, position_ids=torch.arange(6))
        with pytest.raises(ValueError, match="labels must be within"):
            model(ids, labels=ids + VOCABULARY)

    def test_fields_that_were_set_since(self) -> None:
        config = tiny_config()
        config.num_hidden_layers = 8
        with pytest.raises(ValueError, match="num_hidden_layers = 8"):
            sdm.SDMForCausalLM(config)
        config = tiny_config()
        config.global_layer = "gdn"
        with pytest.raises(ValueError, match="global_layer = 'gdn' contradicts layer_types"):
            sdm.SDMForCausalLM(config)

    def test_limit_counts_documents(self, caplog: pytest.LogCaptureFixture) -> None:
        model, ids = tiny_model(max_position_embeddings=6), tokens(1, 12)
        model(ids, cu_seqlens=torch.tensor([0, 6, 12]))
        assert not caplog.records
        model(ids, cu_seqlens=torch.tensor([0, 7, 12]))
        assert "a stream of 7 tokens exceeds max_position_embeddings = 6" in caplog.text
