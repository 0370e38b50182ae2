"""Defaults, files and flags; what contradicts itself is refused with the numbers."""

import pytest

from megadiff.config import Config, ConfigError, load_config, to_yaml, validate

RUN = ["--train-iters", "10"]
RAMP_UP = ["--global-batch-size", "16", "--rampup-batch-size"]


def test_flags_win_over_files_and_files_over_defaults(tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text("model:\n  num_layers: 3\n  hidden-size: 96\noptimizer:\n  lr: 1e-4\n")
    config = load_config(["--config", str(file), "--num-layers", "5"])
    assert (config.model.num_layers, config.model.hidden_size) == (5, 96)
    assert config.optimizer.lr == 1e-4
    assert config.model.num_attention_heads == Config().model.num_attention_heads


def test_the_resolved_configuration_reads_back(tmp_path):
    config = load_config([*RUN, "--data-path", "0.3", "a", "0.7", "b", "--no-swiglu", "--bf16"])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_config(["--config", str(file)]) == config


def test_megatron_spellings():
    assert not load_config(["--disable-bias-linear"]).model.mlp_bias
    assert load_config(["--override-opt_param-scheduler"]).optimizer.override_opt_param_scheduler
    assert load_config(["--attention-dropout", "0"]).model.attention_dropout == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  num_layer: 3\n", "unknown key model.num_layer; did you mean num_layers?"),
        ("modle:\n  num_layers: 3\n", "unknown section 'modle'; did you mean model?"),
        ("model:\n  num_layers: three\n", "model.num_layers: expected int, found 'three'"),
        ("model:\n  num_layers: 2.5\n", "expected int, found 2.5"),
        ("model:\n  swiglu: 1\n", "model.swiglu: expected bool, found 1"),
        ("model:\n  token_mixer: diff\n", "'diff' is none of standard"),
        ("data:\n  data_path: corpus\n", "expected a list, found 'corpus'"),
        ("model: [\n", "not valid YAML"),
        ("- model\n", "expected sections"),
    ],
)
def test_bad_files(tmp_path, text, message):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(["--config", str(file)])
    assert str(file) in str(error.value)
    assert message in str(error.value)


def test_a_base_that_is_no_path(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("base: [other.yaml]\n")
    with pytest.raises(ConfigError, match="No such file"):
        load_config(["--config", str(file)])


def test_missing_file():
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: No such file or directory$"):
        load_config(["--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layer", "3"], "unknown flag --num-layer; did you mean --num-layers?"),
        (["--num-layers", "three"], "invalid int value: 'three'"),
        (["--pipeline-schedule", "zbv"], "--pipeline-schedule: invalid choice: 'zbv'"),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ConfigError) as error:
        load_config(flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        ([], 1, "--train-iters is missing"),
        ([*RUN, "--hidden-dropout", "0.1"], 1, "dropout is not offered"),
        ([*RUN, "--num-query-groups", "5"], 1, "12 is not a multiple of --num-query-groups 5"),
        ([*RUN, "--hidden-size", "100"], 1, "--hidden-size 100 is not a multiple of the 12"),
        ([*RUN, "--hidden-size", "36"], 1, "even head width, and diff_v2 has 3"),
        ([*RUN, "--tensor-model-parallel-size", "2"], 3, "world size 3 is not a multiple"),
        ([*RUN, "--tensor-model-parallel-size", "5"], 5, "12 is not a multiple of --tensor"),
        ([*RUN, "--global-batch-size", "6", "--micro-batch-size", "2"], 2, "2 x data-parallel"),
        ([*RUN, "--hybrid-layer-pattern", "12x"], 1, "may only hold"),
        ([*RUN, "--hybrid-layer-pattern", "12121"], 1, "5 symbols, which do not divide"),
        ([*RUN, "--bf16", "--fp16"], 1, "at most one of"),
        ([*RUN, "--min-lr", "1"], 1, "--min-lr 1.0 must lie between 0 and --lr 0.0003"),
        ([*RUN, "--lr-warmup-iters", "11"], 1, "longer than the schedule of 10 steps"),
        ([*RUN, "--save-interval", "5"], 1, "without --save"),
        ([*RUN, "--async-save"], 1, "--async-save is given without --save"),
        ([*RUN, "--keep-last-n-checkpoints", "2"], 1, "is given without --save"),
        ([*RUN, "--save", "x", "--save-retain-interval", "2"], 1, "everything is kept"),
        (
            [*RUN, "--save", "x", "--non-persistent-save-interval", "2"],
            1,
            "needs --non-persistent-global-ckpt-dir or --non-persistent-local-ckpt-dir",
        ),
        ([*RUN, "--loss-spike-skip-iters", "8"], 1, "needs --loss-spike-sigma-factor, and --save"),
        ([*RUN, "--max-consecutive-skipped-iters", "0"], 1, "must be positive"),
        ([*RUN, "--main-weights", "kahan"], 1, "bfloat16 parameters: give --bf16"),
        ([*RUN, "--fp16", "--fp8"], 1, "--fp8 is for models in bfloat16, not float16"),
        ([*RUN, "--bf16", "--fp8", "--seq-length", "20"], 1, "a multiple of 16 tokens"),
        ([*RUN, "--bf16", "--fp8", "--deepspeed"], 1, "native engine, not for --deepspeed"),
        (
            [
                *RUN,
                "--deepspeed",
                "--tensor-model-parallel-size",
                "2",
                "--sequence-parallel",
                "--tp-comm-overlap",
            ],
            2,
            "--deepspeed does not go with --tp-comm-overlap",
        ),
        ([*RUN, "--loss-scale", "128"], 1, "--loss-scale 128.0 is for --fp16"),
        ([*RUN, "--fp16", "--hysteresis", "0"], 1, "--hysteresis is 0, must be positive"),
        ([*RUN, "--overlap-param-gather"], 1, "needs --use-distributed-optimizer"),
        ([*RUN, "--train-samples", "50"], 1, "which are 50 steps: give one of them"),
        ([*RUN, *RAMP_UP, "4", "4"], 1, "START INCREMENT SAMPLES, not 2 numbers"),
        ([*RUN, *RAMP_UP, "4", "5", "9"], 1, "16 - 4 is not a multiple of the increment 5"),
        ([*RUN, *RAMP_UP, "4", "4", "9"], 8, "4 and 4 must be multiples of --micro-batch-size"),
        ([*RUN, *RAMP_UP, "32", "4", "9"], 1, "start at no more than --global-batch-size 16"),
        ([*RUN, *RAMP_UP, "4", "4", "9"], 1, "needs --train-samples"),
        ([*RUN, "--num-layers", "0"], 1, "--num-layers is 0, must be positive"),
        ([*RUN, "--distributed-timeout-minutes", "1e300"], 1, "1e+300 is more than a year"),
        (
            [
                *RUN,
                *("--position-embedding-type", "learned_absolute"),
                *("--max-position-embeddings", "64", "--seq-length", "128"),
            ],
            1,
            "--seq-length 128 is longer than --max-position-embeddings 64",
        ),
        (
            [*RUN, "--num-query-groups", "3", "--tensor-model-parallel-size", "2"],
            2,
            "--num-query-groups 3 and --tensor-model-parallel-size 2",
        ),
        (
            [*RUN, "--sequence-parallel", "--seq-length", "9", "--tensor-model-parallel-size", "2"],
            2,
            "--seq-length 9 is not a multiple",
        ),
    ],
)
def test_contradictions(flags, world, message):
    with pytest.raises(ConfigError) as error:
        validate(load_config(flags), world)
    assert message in str(error.value)


def test_defaults_that_depend_on_others():
    config = load_config([*RUN, "--micro-batch-size", "2", "--tensor-model-parallel-size", "2"])
    validate(config, 8)
    assert config.training.global_batch_size == 8
    model = config.model
    assert model.ffn_size == 2048
    assert (model.head_width("diff_v2"), model.head_width("diff_v1")) == (64, 32)


def test_batch_rampup_stays_equally_long_at_each_size():
    """From 8 by 4 to 16 over 100 samples: 8 until 50 (in 7 steps), 12 until 100 (in 4)."""
    config = load_config([*RAMP_UP, "8", "4", "100", "--train-samples", "200"])
    validate(config, 1)
    sizes, consumed = [], 0
    while consumed + config.training.batch_size(consumed) <= 200:
        sizes.append(config.training.batch_size(consumed))
        consumed += sizes[-1]
    assert sizes == [8] * 7 + [12] * 4 + [16] * 6
    assert config.training.train_iters == len(sizes)
    assert config.training.total_samples == 200


def test_samples_without_rampup_are_whole_steps():
    config = load_config(["--train-samples", "50", "--micro-batch-size", "4"])
    validate(config, 2)
    assert config.training.train_iters == 6


def test_megatrons_spelling_with_underscores_is_understood() -> None:
    config = load_config(["--override-opt_param-scheduler", "--data-cache_path=a_b"])
    assert config.optimizer.override_opt_param_scheduler
    assert config.data.data_cache_path == "a_b"
