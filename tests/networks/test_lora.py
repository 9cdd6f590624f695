"""Adapters on a frozen network, against the formula in float64 and against peft's own model."""

import numpy as np
import peft
import pytest
import torch
from artifact_files import SHAPE, make_network, refused
from torch import nn

from ddm_lightning.config.experiment import LoraConfig
from ddm_lightning.flow.condition import Condition
from ddm_lightning.networks.lora import adapt, frozen, merged, write_peft

LORA = LoraConfig(rank=3, alpha=1.5, target_modules=["qkv", "mlp.0", "patch_embedding"])
ADAPTED = ("blocks.0.attention.qkv", "blocks.0.mlp.0", "patch_embedding")


def adapted(lora=LORA, *without):
    """A network with adapters that are not zero, and the base under them without some weights."""
    network = make_network("expert", 0).double()
    base = {name: value.clone() for name, value in network.state_dict().items() if name not in without}
    adapt(network, lora, base)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)

    return network, base


def inputs():
    generator = torch.Generator().manual_seed(0)
    x_t, text = (torch.randn(4, *shape, generator=generator, dtype=torch.float64) for shape in (SHAPE, (5,)))
    return x_t, torch.linspace(0.1, 1, 4, dtype=torch.float64), Condition(text, torch.arange(4) > 0)


def test_adapted_layers_compute_the_formula():
    network, base = adapted()
    state = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    expected = {name: value.numpy() for name, value in base.items()}
    for layer in ADAPTED:
        down, up = (state[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        assert down.shape[0] == up.shape[1] == 3
        expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + 0.5 * up @ down

    plain = make_network("expert", 1).double()
    plain.load_state_dict({name: torch.from_numpy(value) for name, value in expected.items()})
    assert torch.allclose(network(*inputs()), plain(*inputs()), rtol=0, atol=1e-12)
    for name, value in merged(network).items():
        np.testing.assert_allclose(value.detach().numpy(), expected[name], rtol=0, atol=1e-12)


def test_only_adapters_are_trained_and_saved():
    network, base = adapted(LORA, "final.out.bias")
    names = {f"{layer}.lora_{part}.default.weight" for layer in ADAPTED for part in "AB"} | {"final.out.bias"}
    assert {name for name, one in network.named_parameters() if one.requires_grad} == names == {*network.state_dict()}
    network(*inputs()).square().sum().backward()
    torch.optim.SGD(network.parameters(), 0.1).step()
    kept = frozen(network)
    assert kept.keys() == base.keys() and all(torch.equal(kept[name], base[name]) for name in base)


def test_an_untrained_adapter_changes_nothing():
    network = make_network("expert")
    plain = make_network("expert")
    adapt(network, LORA, network.state_dict())
    x_t, t, condition = inputs()
    of_float = (x_t.float(), t.float(), Condition(condition.values.float(), condition.keep))
    assert torch.equal(network(*of_float), plain(*of_float))


def test_peft_loads_what_is_written(tmp_path):
    network, base = adapted()
    write_peft(tmp_path, LORA, network.state_dict())
    plain = make_network("expert", 1).double()
    plain.load_state_dict(base)
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path).double()
    assert torch.allclose(loaded(*inputs()), network(*inputs()), rtol=0, atol=1e-6)


class Encoder(nn.Module):
    """torch's own transformer layers, which in eval mode have a fused path of their own."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out_proj = nn.Linear(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.normed(self.out_proj(self.layers(x)))


def test_adapters_act_in_eval_mode_as_in_training():
    network = Encoder().double()
    plain = Encoder().double()
    adapt(network, LoraConfig(rank=3, target_modules=["linear1", "linear2", "out_proj"]), network.state_dict())
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)

    state = network.state_dict()
    assert {name.split(".lora_")[0] for name in state} == {
        *(f"layers.layers.{number}.linear{place}" for number in (0, 1) for place in (1, 2)), "out_proj",
    }  # fmt: skip
    weights = {name: value.clone() for name, value in frozen(network).items()}
    for name, down in state.items():
        if ".lora_A." in name:
            weights[f"{name.split('.lora_')[0]}.weight"] += state[name.replace("lora_A", "lora_B")] @ down

    plain.load_state_dict(weights)
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = plain.train()(x)
    for mode in (network.train(), network.eval()):
        with torch.no_grad():
            assert torch.allclose(mode(x), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("target", ["self_attn.out_proj", "normed"])
def test_layers_on_which_adapters_would_not_act_are_refused(target):
    network = Encoder()
    lora = LoraConfig(rank=2, target_modules=[target])
    refused(
        lambda: adapt(network, lora, network.state_dict()), "lora.target_modules", target, "linear1, linear2, out_proj"
    )


@pytest.mark.parametrize(
    ("targets", "words"),
    [(["qkv", "to_q"], ["to_q", "attention.qkv", "mlp.0"]), ([], ["target_modules"])],
)
def test_layers_that_do_not_exist_are_refused(targets, words):
    refused(lambda: adapted(LoraConfig(rank=2, target_modules=targets)), *words)


def test_a_base_of_another_network_is_refused():
    network = make_network("expert")
    base = network.state_dict() | {"patch_embedding.weight": torch.zeros(8, 3)}
    refused(lambda: adapt(network, LORA, base), "patch_embedding.weight", "base")
