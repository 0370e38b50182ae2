"""Preprocessing as a whole: the same bytes for any format, number of workers, interruption."""

import bz2
import gzip
import json
import lzma
import random
from pathlib import Path

import pytest

from megadiff.data import preprocess as module
from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.inputs import list_inputs
from megadiff.data.preprocess import PreprocessSettings, TokenizerSettings, Totals, preprocess
from megadiff.data.preprocess_output import exclusive
from megadiff.data.sentences import split_sentences

TOKENIZER = TokenizerSettings("ByteTokenizer")


def make_texts(count: int = 120) -> list[str]:
    rng = random.Random(7)
    words = ["alpha", "beta", "γάμμα", "дельта", "长", "👩‍🔬", "\n", "  "]
    return [" ".join(rng.choices(words, k=rng.randrange(1, 200))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    lines = [json.dumps({"text": t, "id": f"{i} b"}) for i, t in enumerate(make_texts())]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(source: Path | str, prefix: Path, **settings) -> Totals:
    settings.setdefault("append_eod", True)
    return preprocess(PreprocessSettings([str(source)], str(prefix), TOKENIZER, **settings))


def contents(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    prefix = tmp_path_factory.mktemp("expected") / "out"
    totals = run(corpus, prefix)
    dataset = IndexedDataset(f"{prefix}_text_document")
    texts = make_texts()
    assert totals.documents == dataset.document_count == len(texts)
    for i, text in enumerate(texts):
        assert dataset.document(i).tolist() == [*text.encode(), 256]
    return contents(Path(f"{prefix}_text_document"))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megadiff.data.inputs.BLOCK", 2000)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_writes_the_same(
    workers: int, corpus: Path, expected: tuple, tmp_path: Path, small_blocks: None
) -> None:
    run(corpus, tmp_path / "out", workers=workers)
    assert contents(tmp_path / "out_text_document") == expected


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").compress(data)


@pytest.mark.parametrize(
    "compress", [gzip.compress, lzma.compress, bz2.compress, zstd], ids=["gz", "xz", "bz2", "zst"]
)
def test_compressed_files(
    compress, corpus: Path, expected: tuple, tmp_path: Path, small_blocks: None
) -> None:
    data = corpus.read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    source = tmp_path / "corpus"  # two streams, one after another; the name says nothing
    source.write_bytes(compress(data[:half]) + compress(data[half:]))
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out_text_document") == expected


def test_parquet(corpus: Path, expected: tuple, tmp_path: Path, small_blocks: None) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = tmp_path / "corpus.parquet"
    parquet.write_table(
        pa.table({"n": range(120), "text": make_texts()}), source, row_group_size=30
    )
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize("separator", ["<|end|>", "\n\n\n\n", "§"])
def test_plain_text(
    separator: str, corpus: Path, expected: tuple, tmp_path: Path, small_blocks: None
) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text(separator.join(make_texts()))
    run(source, tmp_path / "out", separator=separator)
    assert contents(tmp_path / "out_text_document") == expected


@pytest.mark.parametrize("suffix", ["", ".gz", ".parquet"])
def test_interrupted_runs_go_on(
    suffix: str,
    corpus: Path,
    expected: tuple,
    tmp_path: Path,
    small_blocks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = tmp_path / f"corpus.jsonl{suffix}"
    if suffix == ".parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pa.table({"text": make_texts()}), source, row_group_size=30)
    else:
        data = corpus.read_bytes()
        source.write_bytes(gzip.compress(data) if suffix else data)
    done = module._add
    left = 0

    def fail_after_some(totals: Totals, result: module.BlockResult) -> Totals:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return done(totals, result)

    monkeypatch.setattr(module, "_add", fail_after_some)
    starts = []
    for left in (5, 3, 7, 0):  # noqa: B007 (read by fail_after_some)
        try:
            run(source, tmp_path / "out", partition_bytes=5000)
        except KeyboardInterrupt:
            starts.append(json.loads((tmp_path / "out.journal").read_text())["totals"]["documents"])
            # what a machine that loses power leaves: bytes after those the journal knows of
            with (tmp_path / "out_text_document.bin.part").open("ab") as file:
                file.write(b"torn")
    assert starts == sorted(set(starts)) and len(starts) == 3
    assert contents(tmp_path / "out_text_document") == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        source.name,
        "out_text_document.bin",
        "out_text_document.idx",
        "out_text_document.origin.json",
    ]


def test_a_run_that_wrote_nothing_leaves_nothing(corpus: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n" + corpus.read_text())
    with pytest.raises(DataError, match="line 1: not JSON"):
        run(bad, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [bad]
    totals = run(bad, tmp_path / "out", on_error="skip")
    assert totals.skipped == 1 and totals.reasons == {"not JSON": 1}


@pytest.mark.parametrize("call", range(7))
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_interrupted_at_its_end_goes_on(
    call: int,
    overwrite: bool,
    corpus: Path,
    expected: tuple,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The renames: of the journal, .bin and .idx of each key, the origin of each."""
    if overwrite:
        run(corpus, tmp_path / "out", keys=("text", "id"), append_eod=False)
    rename, calls = Path.rename, 0

    def interrupted(self: Path, target: Path | str) -> Path:
        nonlocal calls
        calls += 1
        if calls == call + 2:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        try:
            run(corpus, tmp_path / "out", keys=("text", "id"), overwrite=overwrite)
        except KeyboardInterrupt:
            assert call < 6
            if overwrite and call == 0:  # nothing is published: the old data are still there
                with pytest.raises(DataError, match="--overwrite"):
                    run(corpus, tmp_path / "out", keys=("text", "id"))
            capsys.readouterr()
            rename_calls = calls
            run(corpus, tmp_path / "out", keys=("text", "id"), overwrite=overwrite)
            assert calls > rename_calls
            assert "going on after 120 documents" in capsys.readouterr().out
    assert contents(tmp_path / "out_text_document") == expected
    suffixes = ("bin", "idx", "origin.json")
    names = [f"out_{key}_document.{suffix}" for key in ("id", "text") for suffix in suffixes]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_settings_of_an_interrupted_run_are_checked(
    corpus: Path, tmp_path: Path, small_blocks: None
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(corpus.read_text() + "not json\n")
    with pytest.raises(DataError, match="line 121"):
        run(bad, tmp_path / "out")
    with pytest.raises(DataError, match="unfinished run whose append_eod differ"):
        run(bad, tmp_path / "out", append_eod=False)
    (tmp_path / "out_text_document.bin.part").rename(tmp_path / "kept")
    with pytest.raises(DataError, match="is shorter than its journal says"):
        run(bad, tmp_path / "out")
    (tmp_path / "kept").rename(tmp_path / "out_text_document.bin.part")
    bad.write_text(corpus.read_text())
    with pytest.raises(DataError, match="unfinished run whose inputs differ"):
        run(bad, tmp_path / "out")
    run(bad, tmp_path / "out", overwrite=True)


def test_errors_up_to_a_number(corpus: Path, tmp_path: Path, small_blocks: None) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("[]\n" * 3 + corpus.read_text() + "[]\n" * 3)
    with pytest.raises(DataError, match=r"more than --max-errors 4 .* line 125: not an object"):
        run(bad, tmp_path / "out", on_error="skip", max_errors=4)
    totals = run(bad, tmp_path / "out", on_error="skip", max_errors=6)  # goes on from there
    assert (totals.documents, totals.skipped) == (120, 6)
    assert len((tmp_path / "out.errors.jsonl").read_text().splitlines()) == 6


def test_two_runs_on_one_prefix_refuse_each_other(corpus: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    with exclusive(str(prefix)), pytest.raises(DataError, match="another run is writing"):
        run(corpus, prefix)
    run(corpus, prefix)


def test_output_is_not_overwritten_by_chance(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out")
    with pytest.raises(DataError, match="--overwrite"):
        run(corpus, tmp_path / "out")
    run(corpus, tmp_path / "out", overwrite=True, append_eod=False)
    with pytest.raises(DataError, match="there is no folder"):
        run(corpus, tmp_path / "absent" / "out")


def test_several_keys(corpus: Path, expected: tuple, tmp_path: Path) -> None:
    run(corpus, tmp_path / "out", keys=("text", "id"))
    assert contents(tmp_path / "out_text_document") == expected
    ids = IndexedDataset(str(tmp_path / "out_id_document"))
    assert ids.document(17).tolist() == [*b"17 b", 256]
    corpus.rename(text := tmp_path / "corpus.txt")
    with pytest.raises(DataError, match="plain text has no keys"):
        run(text, tmp_path / "text", keys=("text", "id"))


def test_bos_and_sentences(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "One. Two two? Three"}) + '\n{"text": "Four!"}\n')
    run(source, tmp_path / "out", bos=True, split_sentences=True)
    dataset = IndexedDataset(str(tmp_path / "out_text_sentence"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == [
        [257, *b"One. "],
        [*b"Two two? "],
        [*b"Three", 256],
        [257, *b"Four!", 256],
    ]
    assert dataset.documents.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Dr. Smith came. He left.", ["Dr. Smith came. ", "He left."]),
        ("It is 3.14 e.g. here. So?", ["It is 3.14 e.g. here. ", "So?"]),
        ('"Stop!" he said. Then: no', ['"Stop!" he said. ', "Then: no"]),
        ("これは文です。次の文です。", ["これは文です。", "次の文です。"]),
        ("A title\n\nA paragraph", ["A title\n\n", "A paragraph"]),
        ("J. S. Bach wrote. Yes", ["J. S. Bach wrote. ", "Yes"]),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences
    assert "".join(split_sentences(text)) == text


def test_files_of_folders_and_globs(tmp_path: Path) -> None:
    for name in ("part-10.jsonl", "part-2.jsonl.gz", ".hidden.jsonl", "notes.xml", "sub/A.TXT"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()

    def names(*words: str) -> list[str]:
        return [Path(p).name for p in list_inputs([str(tmp_path / w) for w in words])]

    assert names("") == ["part-2.jsonl.gz", "part-10.jsonl", "A.TXT"]
    assert names("part-*") == ["part-2.jsonl.gz", "part-10.jsonl"]
    assert names("sub", "part-10.jsonl") == ["A.TXT", "part-10.jsonl"]
    with pytest.raises(DataError, match="no such file"):
        names("absent*.jsonl")
    with pytest.raises(DataError, match="more than once"):
        names("part-*", "part-10.jsonl")
