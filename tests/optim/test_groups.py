from megadiff.config import ModelConfig, OptimizerConfig
from megadiff.models.decoder import Decoder
from megadiff.optim.groups import describe_groups

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    vocab_size=10,
    token_mixer="diff_v1",
    ffn_hidden_size=24,
    make_vocab_size_divisible_by=1,
)


def test_norms_and_lambda_do_not_decay() -> None:
    model = Decoder(MODEL, device="meta")
    assert describe_groups(model, OptimizerConfig(lambda_lr_multiplier=0.5)) == [
        "embedding: 1 tensors, 160 parameters, adam, weight decay",
        "lambda: 8 tensors, 32 parameters, adam, no decay, learning rate x 0.5",
        "matrix: 14 tensors, 4,352 parameters, adam, weight decay",
        "vector: 7 tensors, 96 parameters, adam, no decay",
    ]


def test_muon_takes_the_matrices_alone() -> None:
    lines = describe_groups(Decoder(MODEL, device="meta"), OptimizerConfig(optimizer="muon"))
    assert ["adam" in line for line in lines] == [True, True, True, False]
    assert lines[3] == "matrix: 14 tensors, 4,352 parameters, muon, weight decay"
