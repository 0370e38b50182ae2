"""A directory of checkpoints, laid out as Megatron's: what is in it, what is whole, what may go.

    latest_checkpointed_iteration.txt    the step to resume from
    iter_0000100/                        a checkpoint (see `storage`)
    .saving_iter_0000200/                one being written, or what a crash left of it

Nothing here needs a process group.
"""

import json
import re
import shutil
from pathlib import Path

from megadiff.checkpoint.files import DurableFile, in_threads, read_index
from megadiff.checkpoint.ranks import describe
from megadiff.checkpoint.storage import FORMAT, MANIFEST, file_entry, sync_directory

TRACKER = "latest_checkpointed_iteration.txt"
_SAVING, _REMOVING = ".saving_", ".removing_"


def checkpoint_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"iter_{step:07d}"


def step_of(path: Path) -> int:
    """The step of the checkpoint at `path`."""
    return int(path.name.removeprefix("iter_"))


def saving_path(root: str | Path, step: int) -> Path:
    return Path(root) / f"{_SAVING}iter_{step:07d}"


def list_steps(root: str | Path) -> list[int]:
    """Steps of all checkpoints in `root`, whole or not, ascending."""
    if not Path(root).is_dir():
        return []
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in Path(root).iterdir())
    return sorted(int(name[1]) for name in names if name)


def read_tracker(root: str | Path) -> int:
    """The step that the tracker names. Raises ValueError when there is none or it is no number."""
    path = Path(root) / TRACKER
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable ({describe(error)})") from None
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{path} holds {text[:40]!r}, not a step")
    return int(text)


def write_tracker(root: str | Path, step: int) -> None:
    """Let the tracker name `step`, at once and durably."""
    path = Path(root) / TRACKER
    new = path.with_name(f".{TRACKER}.new")
    with DurableFile(new) as file:
        file.write(f"{step}\n".encode())
    new.replace(path)
    sync_directory(Path(root))


def publish(root: str | Path, step: int) -> Path:
    """Give the whole checkpoint at `saving_path` its name; an earlier one of this step goes."""
    path = checkpoint_path(root, step)
    if path.exists():
        _set_aside(path)
    saving_path(root, step).rename(path)
    sync_directory(Path(root))
    sweep(root)
    return path


def remove(path: Path) -> None:
    """Delete a checkpoint; from the first moment on nobody takes what is left for a checkpoint."""
    shutil.rmtree(_set_aside(path))


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{_REMOVING}{path.name}")
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def sweep(root: str | Path) -> None:
    """Delete what crashed saves and removals left in `root`."""
    for path in Path(root).glob(".*_iter_*"):
        if path.name.startswith((_SAVING, _REMOVING)):
            shutil.rmtree(path)


def remove_all_but(root: str | Path, step: int) -> None:
    """Delete all checkpoints in `root` but that of `step`."""
    for other in list_steps(root):
        if other != step:
            remove(checkpoint_path(root, other))


def give_up_after(step: int, root: Path, spared: set[Path] | None) -> None:
    """Let the tracker name `step`, or the newest before it; delete what is later.

    None of `spared` is looked at. Nothing is done where later ones are all there is, unless it is
    None: then the place may become empty.
    """
    paths = {s: checkpoint_path(root, s) for s in list_steps(root)}
    mine = [s for s, path in paths.items() if path not in (spared or ())]
    kept = [s for s in mine if s <= step]
    if spared is not None and not kept:
        return
    if not kept:
        (root / TRACKER).unlink(missing_ok=True)
    elif (root / TRACKER).exists():
        write_tracker(root, kept[-1])
    for later in mine[len(kept) :]:
        remove(paths[later])


def try_to_write(root: Path) -> None:
    """Create `root` if needed. Raises OSError when it cannot be written."""
    root.mkdir(parents=True, exist_ok=True)
    probe = root / ".probe"
    with DurableFile(probe) as file:
        file.write(b"x")
    probe.unlink()


def read_manifest(path: Path) -> dict[str, dict]:
    """Size and checksum by file name. Raises ValueError when there is no such thing."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {
            str(name): {"bytes": int(e["bytes"]), "crc32": str(e["crc32"])}
            for name, e in manifest["files"].items()
        }
        version = int(manifest["format"])
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing: the save was not finished") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({describe(error)})") from None
    if version > FORMAT:
        raise ValueError(f"format {version} is newer than this program, which reads {FORMAT}")
    if any(Path(name).name != name for name in files):
        raise ValueError(f"{MANIFEST} names files outside of the checkpoint")
    return files


def damage(path: Path, checksums: bool = True, part: int = 0, parts: int = 1) -> list[str]:
    """What is wrong with the checkpoint at `path`, an empty list when it is whole.

    Sizes of files, and with `checksums` their contents; of `parts` processes that check together,
    number `part` looks at its share of the files.
    """
    if not path.is_dir():
        return ["there is no such checkpoint"]
    try:
        files = read_manifest(path)
    except ValueError as error:
        return [str(error)]

    def problem(name: str) -> str | None:
        entry = files[name]
        try:
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes instead of {entry['bytes']}"
            if checksums and file_entry(path / name) != entry:
                return f"{name} does not match its checksum"
        except OSError as error:
            return f"{name} is not readable ({describe(error)})"
        return None

    found = in_threads(problem, sorted(files)[part::parts])
    problems = [text for text in found if text is not None]
    if not problems and part == 0:
        try:
            read_index(path)
        except (OSError, ValueError) as error:
            problems.append(describe(error))
    return problems


def expired(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Which of `steps` retention lets go: not the last `keep_last`, not multiples of `keep_every`.

    Without `keep_last` nothing goes.
    """
    if keep_last is None:
        return []
    old = sorted(steps)[: max(len(steps) - max(keep_last, 1), 0)]
    return [step for step in old if not keep_every or step % keep_every]
