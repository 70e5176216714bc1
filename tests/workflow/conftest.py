"""A complete project: copied sources, a tiny target, two small prompt sources, run with the real Snakemake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from eagle3.artifacts.registry import STAGES
from tests.conftest import build_once

ROOT = Path(__file__).parents[2]
PLACES = ("river", "hill", "garden", "bridge", "market", "island", "forest", "harbour")


@dataclass
class Run:
    """What one call of Snakemake did."""

    code: int
    text: str

    @property
    def computed(self) -> set[str]:
        """Folders under results/demo/ whose artifact was computed."""
        return set(re.findall(rf"(?:{'|'.join(STAGES)}): results/demo/(\S+)$", self.text, re.MULTILINE))

    @property
    def adopted(self) -> set[str]:
        """Folders under results/demo/ whose artifact came from the store."""
        return set(re.findall(r"results/demo/(\S+): adopted from the store", self.text, re.MULTILINE))

    @property
    def idle(self) -> bool:
        return "Nothing to be done" in self.text


@dataclass
class Project:
    """A checkout with a configuration of its own."""

    path: Path

    def environment(self) -> dict[str, str]:
        python = Path(sys.executable).parent
        return os.environ | {
            "PYTHONPATH": str(self.path),
            "PATH": f"{python}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]

    def snakemake(self, *arguments: str, ok: bool = True) -> Run:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if ok:
            assert done.returncode == 0, done.stdout[-6000:]
        return Run(done.returncode, done.stdout)

    def eagle3(self, *arguments: str) -> Run:
        done = subprocess.run(
            [sys.executable, "-c", "from eagle3.cli.main import main; main()", *arguments],
            cwd=self.path,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return Run(done.returncode, done.stdout)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.path / file
        text = path.read_text()
        assert old in text, f"{old!r} is not in {file}"
        path.write_text(text.replace(old, new, 1))

    def set(self, **sections: object) -> None:
        """Change settings: `set(seed=1)` or `set(dataset={"eval_fraction": 0.2})`."""
        path = self.path / "config/config.yaml"
        values = yaml.safe_load(path.read_text())
        for section, value in sections.items():
            values[section] = values.get(section, {}) | value if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(values))

    def artifacts(self) -> dict[str, bytes]:
        """Content of every artifact file of the run, without manifests, logs and benchmarks."""
        run = self.path / "results/demo"
        files = (path for path in sorted(run.rglob("*")) if path.is_file() and path.name != "manifest.json")
        names = {path.relative_to(run).as_posix(): path for path in files}
        return {
            name: path.read_bytes() for name, path in names.items() if not name.startswith(("logs/", "benchmarks/"))
        }

    def copy(self, destination: Path) -> Project:
        """Copy everything, hard links between results and store included."""
        subprocess.run(["cp", "-a", str(self.path), str(destination)], check=True)
        return Project(destination)


def write_prompts(path: Path, kind: str, count: int) -> None:
    lines = [
        json.dumps(
            {"messages": [{"role": "user", "content": f"{kind} {i} about the {PLACES[i % 8]} and number {i * 7}"}]}
        )
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")


def new_project(path: Path, target: Path) -> Project:
    """Make a project that has not run yet."""
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("eagle3", "workflow"):
        shutil.copytree(ROOT / folder, path / folder, ignore=ignore)
    (path / "config").mkdir()
    (path / "prompts").mkdir()
    write_prompts(path / "prompts/chat.jsonl", "tell me", 14)
    write_prompts(path / "prompts/code.jsonl", "write code", 10)
    config = {
        "run": "demo",
        "seed": 3,
        "target": {"model": str(target)},
        "prompts": {"sources": [{"path": "prompts/chat.jsonl"}, {"path": "prompts/code.jsonl"}], "parts": 2},
        "engine": {"dtype": "float32", "batch_size": 4},
        "responses": {"max_tokens": 24, "temperature": 1.0},
        "samples": {"max_repeats": 1000},
        "dataset": {"eval_fraction": 0.25},
        "vocabulary": {"size": 128},
        "draft": {"unroll": 3, "epochs": 2, "batch_tokens": 256, "learning_rate": 1e-3},
        "acceptance": {"drafts": 2, "prompts": 4, "max_tokens": 12},
        "machine": {"threads": 1, "checkpoint_every": 1},
    }
    (path / "config/config.yaml").write_text(yaml.safe_dump(config))
    return Project(path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Project:
    """A project that ran once, undisturbed. Do not change it: copy it."""
    folder = build_once(
        tmp_path_factory, "finished", lambda folder: new_project(folder / "project", tiny_target).snakemake()
    )
    return Project(folder / "project")


@pytest.fixture
def project(finished: Project, tmp_path: Path) -> Project:
    """A copy of the finished project, to be changed."""
    return finished.copy(tmp_path / "project")
