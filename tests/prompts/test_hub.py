"""Data sets of the hub, read by the real library from a small hub on this machine."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import polars
import pytest

from eagle3.artifacts.workflow import Workflow
from eagle3.config.configuration import resolve
from eagle3.config.prompts import HubSettings
from eagle3.errors import Eagle3Error
from eagle3.files.records import read_json, read_records
from eagle3.prompts.hub import read_hub
from tests.prompts.rows import run, user

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = [{"messages": user(f"question {number}"), "kind": number % 2} for number in range(5)]
needs_library = pytest.mark.skipif(find_spec("datasets") is None, reason="needs the extra `hub`")

SCRIPT = """
import json, sys
from pathlib import Path
from eagle3.stages import prompts
from eagle3.errors import Eagle3Error
from eagle3.config.prompts import PromptsSettings
folder = Path(sys.argv[2])
folder.mkdir()
try:
    prompts.make(PromptsSettings.model_validate(json.loads(sys.argv[1])), folder=folder)
except Eagle3Error as error:
    sys.exit(str(error))
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    polars.DataFrame(rows).write_parquet(file)
    return file.getvalue()


def files() -> dict[str, bytes]:
    """Return the data set: a subset with two splits, and another subset."""
    subsets = "---\nconfigs:\n- {config_name: chats, data_dir: data}\n- {config_name: other, data_dir: other}\n---\n"
    return {
        "data/train.parquet": parquet(ROWS),
        "data/test.parquet": parquet([{"messages": user("of the test split"), "kind": 0}]),
        "other/train.parquet": parquet([{"prompt": "a"}, {"prompt": "b"}]),
        "README.md": subsets.encode(),
    }


class Hub(BaseHTTPRequestHandler):
    """What the library asks of the hub about one data set at one commit."""

    protocol_version = "HTTP/1.1"

    def __init__(self, content: dict[str, bytes], *arguments: Any) -> None:
        self.content = content
        super().__init__(*arguments)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        about, resolve = "/api/datasets/owner/chats", f"/datasets/owner/chats/resolve/{COMMIT}/"
        if path == f"{about}/revision/{COMMIT}":
            names = [{"rfilename": name} for name in self.content]
            self._send(json.dumps({"id": "owner/chats", "sha": COMMIT, "siblings": names, "tags": []}).encode())
        elif path.startswith(f"{about}/tree/{COMMIT}"):
            self._send(json.dumps(self._tree(path.removeprefix(f"{about}/tree/{COMMIT}").strip("/"))).encode())
        elif path.startswith(resolve) and (name := path.removeprefix(resolve)) in self.content:
            self._send(self.content[name])
        else:
            self._send(b"", code=404)

    do_HEAD = do_GET  # noqa: N815

    def _tree(self, folder: str) -> list[dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        for name, data in self.content.items():
            inside = name.removeprefix(f"{folder}/" if folder else "")
            if folder and inside == name:
                continue
            head, slash, _ = inside.partition("/")
            path = f"{folder}/{head}" if folder else head
            kind = "directory" if slash else "file"
            entries[path] = {"type": kind, "path": path, "size": 0 if slash else len(data), "oid": _oid(data)}
        return list(entries.values())

    def _send(self, data: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_oid(data)}"')
        if code == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the environment in which the library finds our hub, and a cache of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, files()))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    home = tmp_path_factory.mktemp("hub")
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    server.shutdown()
    thread.join()
    server.server_close()


def make(folder: Path, environment: dict[str, str], *, where: dict[str, Any] | None = None, **hub: Any) -> str:
    """Run the stage in a process of its own, as the library reads its environment once; return what it says."""
    source = {"hub": {"dataset": "owner/chats", "revision": COMMIT, "subset": "chats", **hub}, "where": where or {}}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"sources": [source]}), str(folder / "out")],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


def contents(folder: Path) -> list[str]:
    rows = read_records(folder / "out" / "part-0.jsonl.zst")
    return sorted(row["messages"][0]["content"] for row in rows)


@needs_library
class TestLibrary:
    def test_a_split_gives_what_its_file_gives(self, hub: dict[str, str], tmp_path: Path) -> None:
        stderr = make(tmp_path, hub, where={"kind": 1})
        assert "owner/chats: read as `messages`" in stderr
        (tmp_path / "chats.parquet").write_bytes(files()["data/train.parquet"])
        run(tmp_path / "same", {"path": str(tmp_path / "chats.parquet"), "where": {"kind": 1}})
        for name in ("part-0.jsonl.zst", "rejects.jsonl.zst", "stats.json"):
            assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
        assert read_json(tmp_path / "out" / "stats.json")["total"]["filtered"] == 3

    def test_another_split_and_subset(self, hub: dict[str, str], tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        make(tmp_path / "a", hub, split="test")
        make(tmp_path / "b", hub, subset="other", split="train[:1]")
        assert contents(tmp_path / "a") == ["of the test split"]
        assert contents(tmp_path / "b") == ["a"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [({"split": "validation"}, "split validation"), ({"subset": "none"}, "none"), ({"dataset": "owner/no"}, "no")],
    )
    def test_what_is_not_there_is_named(
        self, hub: dict[str, str], tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        stderr = make(tmp_path, hub, **change)
        assert "a hub data set cannot be read" in stderr
        assert message in stderr

    def test_without_a_network_the_cache_serves_its_commit_and_no_other(
        self, hub: dict[str, str], tmp_path: Path
    ) -> None:
        for name in "abc":
            (tmp_path / name).mkdir()
        make(tmp_path / "a", hub)
        offline = hub | {"HF_HUB_OFFLINE": "1"}
        make(tmp_path / "b", offline)
        assert contents(tmp_path / "b") == contents(tmp_path / "a")
        stderr = make(tmp_path / "c", offline, revision=COMMIT[::-1])
        assert f"holds another version: {COMMIT}" in stderr
        assert "without a network" in stderr

    def test_a_folder_of_that_name_is_not_read_instead(self, hub: dict[str, str], tmp_path: Path) -> None:
        folder = tmp_path / "owner" / "chats"
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_text('{"prompt": "not from the hub"}\n')
        stderr = make(tmp_path, hub, subset=None)
        assert "a folder of that name, holds another version" in stderr


def test_the_recipe_of_the_prompts_holds_the_commit() -> None:
    values = [
        {"run": "r", "prompts": {"sources": [{"hub": {"dataset": "owner/chats", "revision": revision}}]}}
        for revision in (COMMIT, COMMIT[::-1])
    ]
    first, second = (Workflow(value) for value in values)
    assert first.outside_files("prompts") == []
    assert first.recipe("prompts").replace(COMMIT, COMMIT[::-1]) == second.recipe("prompts") != first.recipe("prompts")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(Eagle3Error, match=r"(?s)library `datasets`.*owner/chats.*pip install -e \"\.\[hub\]\""):
        next(read_hub(HubSettings(dataset="owner/chats", revision=COMMIT)))


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        ({"revision": "main"}, "hub.revision", "40 hexadecimal digits"),
        ({"revision": COMMIT[:7]}, "hub.revision", "40 hexadecimal digits"),
        ({"dataset": "chats"}, "hub.dataset", "owner/name"),
        ({"dataset": "../data/x"}, "hub.dataset", "files on disk go under `path`"),
        ({"spilt": "test"}, "hub.spilt", "did you mean `split`"),
    ],
)
def test_a_wrong_setting_is_named(change: dict[str, str], key: str, expected: str) -> None:
    source = {"hub": {"dataset": "owner/chats", "revision": COMMIT, **change}}
    with pytest.raises(Eagle3Error) as caught:
        resolve({"run": "r", "prompts": {"sources": [source]}})
    assert f"prompts.sources.0.{key}" in str(caught.value)
    assert expected in str(caught.value)
