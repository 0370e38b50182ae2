"""Files as people send them: what is kept of each, and what a strict run says first."""

import gzip
import json
from pathlib import Path

import pytest

from megadiff.data.errors import DataError
from megadiff.data.indexed_dataset import IndexedDataset
from megadiff.data.preprocess import PreprocessSettings, TokenizerSettings, Totals, preprocess
from megadiff.data.tokenizers import ByteTokenizer

NASTY = Path(__file__).parent / "nasty"

# file: documents with text, empty ones, skipped ones, what a strict run reports (None: it succeeds)
OUTCOMES: dict[str, tuple[int, int, int, str | None]] = {
    "bz2_ok.jsonl.bz2": (3, 0, 0, None),
    "dup_docs.jsonl": (11, 0, 0, None),
    "empty_0_bytes.jsonl": (0, 0, 0, "no document with text"),
    "empty_blank_lines_between.jsonl": (3, 0, 0, None),
    "empty_newlines.jsonl": (0, 0, 0, "no document with text"),
    "empty_no_final_newline.jsonl": (3, 0, 0, None),
    "empty_texts.jsonl": (2, 5, 0, None),
    "enc_bom.jsonl": (3, 0, 0, None),
    "enc_control_chars.jsonl": (3, 0, 1, "line 4: not JSON: Invalid control character"),
    "enc_crlf.jsonl": (3, 0, 0, None),
    "enc_invalid_utf8.jsonl": (2, 0, 6, "line 2: not UTF-8: byte 0xe9 at 21"),
    "enc_mixed_eol.jsonl": (4, 0, 0, None),
    "enc_nul.jsonl": (2, 0, 2, "line 2: NUL bytes"),
    "enc_plain_cp1252.txt": (0, 0, 1, "document 1: not UTF-8: byte 0x93 at 6"),
    "enc_plain_euc-kr.txt": (0, 0, 1, "document 1: not UTF-8"),
    "enc_plain_gb18030.txt": (0, 0, 1, "document 1: not UTF-8"),
    "enc_plain_koi8-r.txt": (0, 0, 1, "document 1: not UTF-8"),
    "enc_plain_latin-1.txt": (0, 0, 1, "document 1: not UTF-8"),
    "enc_plain_shift_jis.txt": (0, 0, 1, "document 1: not UTF-8"),
    "enc_unicode_newlines.jsonl": (2, 0, 0, None),
    "enc_utf16be.jsonl": (0, 0, 3, "line 1: NUL bytes: .* or UTF-16 text"),
    "gz_0_bytes.jsonl.gz": (0, 0, 1, "compressed file of 0 bytes: was it cut off"),
    "gz_bad_crc.jsonl.gz": (3, 0, 1, "unreadable file: CRC check failed"),
    "gz_empty_content.jsonl.gz": (0, 0, 0, "no document with text"),
    "gz_multi_member.jsonl.gz": (4, 0, 0, None),
    "gz_not_gzip.jsonl.gz": (3, 0, 0, None),  # plain JSON lines under a wrong name
    "gz_ok.jsonl.gz": (3, 0, 0, None),
    "gz_trailing_zeros.jsonl.gz": (3, 0, 0, None),
    "gz_truncated.jsonl.gz": (507, 0, 1, "ended before the end-of-stream marker"),
    "json_array_not_lines.json": (0, 0, 12, "one array over many lines is not JSON lines"),
    "json_escapes.jsonl": (2, 0, 0, None),
    "json_malformed.jsonl": (2, 0, 10, "line 2: not JSON: Unterminated string"),
    "json_missing_text.jsonl": (2, 0, 5, "line 2: no such key: 'text'; it has 'content'"),
    "json_not_objects.jsonl": (1, 0, 5, "line 1: not an object: the line holds a string"),
    "json_text_types.jsonl": (2, 0, 7, "line 2: not text: 'text' is null"),
    "json_truncated_tail.jsonl": (2, 0, 1, "line 3: not UTF-8|line 3: not JSON"),
    "kind_csv.csv": (0, 0, 4, "line 1: not JSON"),
    "kind_html.jsonl": (0, 0, 1, "line 1: not JSON"),
    "kind_png.txt": (0, 0, 1, "document 1: not UTF-8: byte 0x89 at 0"),
    "pq_binary_invalid.parquet": (1, 0, 2, "row 2: not UTF-8: byte 0xe9 at 3"),
    "pq_large_string_zstd.parquet": (3, 0, 0, None),
    "pq_no_text.parquet": (0, 0, 1, "no column 'text'; it has content"),
    "pq_not_parquet.parquet": (0, 0, 1, "not a Parquet file"),
    "pq_nulls.parquet": (1, 1, 2, "row 1: not text: 'text' is null"),
    "pq_ok.parquet": (3, 0, 0, None),
    "pq_struct.parquet": (0, 0, 1, "no column 'text'; it has doc"),
    "pq_truncated.parquet": (0, 0, 1, "damaged Parquet"),
    "pq_zero_rows.parquet": (0, 0, 0, "no document with text"),
    "uni_emoji_zwj.jsonl": (3, 0, 0, None),
    "uni_invisible.jsonl": (8, 1, 0, None),
    "uni_lone_surrogates.jsonl": (2, 0, 4, "line 1: not Unicode: a lone surrogate at character 5"),
    "uni_rtl_bidi.jsonl": (4, 0, 0, None),
    "uni_scripts.jsonl": (11, 0, 0, None),
    "xz_ok.jsonl.xz": (3, 0, 0, None),
    "zst_no_size.jsonl.zst": (3, 0, 0, None),
    "zst_not_zstd.jsonl.zst": (3, 0, 0, None),
    "zst_ok.jsonl.zst": (3, 0, 0, None),
    "zst_truncated.jsonl.zst": (0, 0, 1, "zstd stream ends early: the file was cut off"),
}


def run(source: Path, folder: Path, on_error: str) -> Totals:
    return preprocess(
        PreprocessSettings(
            [str(source)],
            str(folder / "out"),
            TokenizerSettings("ByteTokenizer"),
            append_eod=True,
            on_error=on_error,  # type: ignore[arg-type]
        )
    )


def texts_of(prefix: Path) -> list[str]:
    """The documents of a byte-level dataset as text, each ending as it should."""
    dataset = IndexedDataset(str(prefix))
    documents = [dataset.document(i).tolist() for i in range(dataset.document_count)]
    assert all(document[-1] == ByteTokenizer.eod for document in documents)
    return [bytes(document[:-1]).decode() for document in documents]


def test_every_file_has_an_outcome() -> None:
    assert {path.name for path in NASTY.iterdir()} == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_strict_run(name: str, tmp_path: Path) -> None:
    kept, empty, _, message = OUTCOMES[name]
    if message is None:
        totals = run(NASTY / name, tmp_path, "stop")
        assert (totals.documents - totals.empty, totals.empty, totals.skipped) == (kept, empty, 0)
        assert len(texts_of(tmp_path / "out_text_document")) == kept
    else:
        with pytest.raises(DataError, match=message):
            run(NASTY / name, tmp_path, "stop")
        assert not list(tmp_path.glob("*.bin")) and not list(tmp_path.glob("*.idx"))


@pytest.mark.parametrize("name", [n for n, outcome in OUTCOMES.items() if outcome[3]])
def test_lenient_run(name: str, tmp_path: Path) -> None:
    kept, empty, skipped, _ = OUTCOMES[name]
    if kept == 0:
        with pytest.raises(DataError, match="no document with text"):
            run(NASTY / name, tmp_path, "skip")
        assert list(tmp_path.iterdir()) == []
        return
    totals = run(NASTY / name, tmp_path, "skip")
    assert (totals.documents - totals.empty, totals.empty, totals.skipped) == (kept, empty, skipped)
    assert len(texts_of(tmp_path / "out_text_document")) == kept
    log = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").open(encoding="utf-8")]
    assert len(log) == skipped
    assert all(entry["source"].endswith(name) and entry["kind"] for entry in log)


@pytest.mark.parametrize(
    "name",
    [
        "enc_unicode_newlines.jsonl",
        "enc_mixed_eol.jsonl",
        "json_escapes.jsonl",
        "uni_emoji_zwj.jsonl",
        "uni_rtl_bidi.jsonl",
        "uni_scripts.jsonl",
    ],
)
def test_text_comes_back_exactly(name: str, tmp_path: Path) -> None:
    run(NASTY / name, tmp_path, "stop")
    lines = (NASTY / name).read_bytes().split(b"\n")
    expected = [json.loads(line)["text"] for line in lines if line.strip()]
    assert texts_of(tmp_path / "out_text_document") == expected


def test_a_long_line_among_short_ones(tmp_path: Path) -> None:
    source = tmp_path / "long.jsonl"
    texts = ["a", "long " * 700_000, "b", " " * 1_000_000, "c"]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    totals = run(source, tmp_path, "stop")
    assert (totals.documents, totals.empty) == (5, 1)
    assert totals.longest == 3_500_001
    assert texts_of(tmp_path / "out_text_document") == [texts[i] for i in (0, 1, 2, 4)]


@pytest.mark.parametrize(
    ("texts", "more"),
    [
        (["a" * 1_000_000, "b" * 1_000_000], {}),  # words that have no end
        (["x"] * 30_000, {}),
        (["short"], {"meta": "m" * 4_000_000}),
    ],
    ids=["no spaces", "many documents of one letter", "another field is large"],
)
def test_sizes(texts: list[str], more: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "large.jsonl"
    source.write_text("".join(json.dumps({**more, "text": text}) + "\n" for text in texts))
    run(source, tmp_path, "stop")
    assert texts_of(tmp_path / "out_text_document") == texts


def test_names(tmp_path: Path) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    names = ["part-2.jsonl", "part-00010.jsonl", "with space.jsonl", "naïve 名前.jsonl"]
    for name in [*names, ".hidden.jsonl", "program.bin"]:
        (folder / name).write_text(json.dumps({"text": name}) + "\n")
    (folder / "UPPER.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "upper"}'))
    run(folder, tmp_path, "stop")
    found = texts_of(tmp_path / "out_text_document")
    assert sorted(found) == sorted([*names, "upper"])
    assert found.index("part-2.jsonl") < found.index("part-00010.jsonl")


def test_many_row_groups(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = [f"row {number}" for number in range(3000)]
    source = tmp_path / "groups.parquet"
    parquet.write_table(pa.table({"text": texts}), source, row_group_size=10)
    run(source, tmp_path, "stop")
    assert texts_of(tmp_path / "out_text_document") == texts


def test_numbers_too_long_and_nesting_too_deep(tmp_path: Path) -> None:
    source = tmp_path / "deep.jsonl"
    source.write_text(
        '{"text": "good", "n": ' + "9" * 5001 + "}\n"
        '{"text": "good", "n": ' + "[" * 200_000 + "]" * 200_000 + "}\n"
        '{"text": "good", "n": NaN}\n'
    )
    totals = run(source, tmp_path, "skip")
    assert (totals.documents, totals.skipped) == (1, 2)
