#!/usr/bin/env python3
"""Continue prompts with a trained model.

    python tools/generate.py --load runs/x/checkpoints --prompt "Once" --prompt "In the"

The model and its tokenizer are those of the checkpoint, whatever its split. One process runs any
model that fits it; under torchrun all processes share the model by tensor parallelism.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megadiff.checkpoint.find import find_checkpoint
from megadiff.checkpoint.ranks import CheckpointError
from megadiff.checkpoint.state import module_tensors
from megadiff.checkpoint.storage import load, read_metadata
from megadiff.config import Config, ConfigError, ParallelConfig
from megadiff.config.validate_split import validate_split
from megadiff.data.tokenizers import Tokenizer, TokenizerSettings
from megadiff.models.decoder import Decoder
from megadiff.models.generation import Sampling, generate
from megadiff.parallel.failure import leave
from megadiff.training.checkpointing import saved_config
from megadiff.training.errors import run
from megadiff.training.setup import Environment, start, world_size


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_flags(parser)
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", action="append", default=[], help="may be repeated")
    text.add_argument("--prompt-file", help="a prompt on each line, as JSON strings or plain")
    text.add_argument("--max-new-tokens", type=int, default=100)
    text.add_argument("--ignore-eod", action="store_true", help="go on behind the document's end")
    text.add_argument("--json", action="store_true", help="an object for each prompt on a line")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    sampling.add_argument("--top-k", type=int, default=0, help="of the k likeliest; 0: of all")
    sampling.add_argument("--top-p", type=float, default=1.0, help="of the likeliest with this sum")
    sampling.add_argument("--seed", type=int, default=1234)
    return parser.parse_args(words)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What `load_model` and `checkpoint_tokenizer` are told."""
    parser.add_argument("--load", required=True, help="folder of checkpoints")
    parser.add_argument("--ckpt-step", type=int, help="step to load; the newest by default")
    parser.add_argument("--tokenizer-model", help="where the tokenizer is now, if it was moved")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16", "fp64"], help="as trained")


def main(words: list[str]) -> None:
    arguments = parse_arguments(words)
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    if arguments.max_new_tokens < 0:
        raise ConfigError(f"--max-new-tokens is {arguments.max_new_tokens}, must not be negative")
    config, env, model = load_model(arguments)
    tokenizer = checkpoint_tokenizer(config, arguments.tokenizer_model)
    texts = arguments.prompt + read_prompts(arguments.prompt_file) or [""]
    prompts = [encode(text, tokenizer) for text in texts]
    check_length(config, max(map(len, prompts)) + arguments.max_new_tokens)
    eod = None if arguments.ignore_eod else tokenizer.eod
    outputs: list[list[int]] = [[] for _ in prompts]
    steps = generate(model, prompts, arguments.max_new_tokens, sampling, eod, tokenizer.vocab_size)
    for step in steps:
        for output, token in zip(outputs, step, strict=True):
            output += [] if token is None else [token]
    if env.is_main:
        for text, prompt, output in zip(texts, prompts, outputs, strict=True):
            whole = tokenizer.decode([*prompt, *output])
            if arguments.json:
                print(json.dumps({"prompt": text, "text": whole, "tokens": output}))
            else:
                print(f"{whole}\n{'-' * 80}")
    leave()


def load_model(arguments: argparse.Namespace) -> tuple[Config, Environment, Decoder]:
    """The checkpoint's configuration and model, split over the processes there are."""
    path = find_checkpoint(arguments.load, arguments.ckpt_step)
    if path is None:
        raise CheckpointError(f"--load {arguments.load}: there is no checkpoint")
    config = saved_config(path, read_metadata(path))
    config.parallel = ParallelConfig(tensor_model_parallel_size=world_size())
    validate_split(config, world_size())
    config.training.device = arguments.device
    if arguments.dtype is not None:
        for name in ("bf16", "fp16", "fp64"):
            setattr(config.training, name, name == arguments.dtype)
    env = start(config)
    model = Decoder(
        config.model,
        env.mesh,
        max_positions=config.training.seq_length,
        dtype=env.dtype,
        device=env.device,
    )
    for parameter in model.parameters():
        parameter.data.zero_()  # padding stays so
    load(path, module_tensors(model), ignore=["optimizer.", "rng."], group=env.control)
    return config, env, model.eval()


def checkpoint_tokenizer(config: Config, moved: str | None) -> Tokenizer:
    """The tokenizer that the model was trained with; NullTokenizer counts ids without the end."""
    d = config.data
    settings = TokenizerSettings.of(d, (config.model.vocab_size or 1) - 1)
    return replace(settings, tokenizer_model=moved or d.tokenizer_model).build()


def read_prompts(path: str | None) -> list[str]:
    lines = [] if path is None else read_text("--prompt-file", path).split("\n")
    return [_read_prompt(line) for line in lines if line]


def read_text(flag: str, path: str) -> str:
    """The text of a file that `flag` names."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: {getattr(error, 'strerror', error)}") from None


def _read_prompt(line: str) -> str:
    """A JSON string, or the line as it is."""
    try:
        value = json.loads(line) if line.startswith('"') else line
    except ValueError:
        return line
    return value if isinstance(value, str) else line


def encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt's tokens; an empty one stands at the beginning of a document."""
    tokens = list(tokenizer.encode(text))
    if tokens:
        return tokens
    start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
    if start is None:
        raise ConfigError("an empty prompt needs a tokenizer with a token to begin with")
    return [start]


def check_length(config: Config, length: int) -> None:
    m = config.model
    if m.position_embedding_type == "learned_absolute":
        positions = m.max_position_embeddings or config.training.seq_length
        if length > positions:
            raise ConfigError(
                f"prompt and new tokens are {length} together, but the model has learned "
                f"{positions} positions; lower --max-new-tokens"
            )


if __name__ == "__main__":
    run(main, sys.argv[1:])
