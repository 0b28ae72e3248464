"""What docs/kubernetes.md and docs/slurm.md give to a cluster, as far as can be told without."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import click
import pytest
import yaml

from syncd import __version__
from syncd.cli import cli
from tests.commands import invoke
from tests.doc_blocks import blocks
from tests.places import DOCS
from tests.programs import completed

FOLDER = DOCS / "kubernetes"
PAGE = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
UNITS = {"Mi": 2**20, "Gi": 2**30}

Manifest = Mapping[str, Any]


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


(KUSTOMIZATION,) = read("kustomization.yaml")
MANIFESTS = [one for name in KUSTOMIZATION["resources"] for one in read(name)]


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in MANIFESTS if one["kind"] == kind}


PODS = {
    name: one["spec"]["template"]
    for kind in ("Deployment", "StatefulSet", "Job")
    for name, one in named(kind).items()
}


def containers(pod: Manifest) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


ALL = [(name, one) for name, pod in PODS.items() for one in containers(pod)]
OURS = [(name, one) for name, one in ALL if one["image"] == "syncd"]


def chosen(labels: Mapping[str, str]) -> list[Manifest]:
    """The pods that a selector is for."""
    return [pod for pod in PODS.values() if labels.items() <= pod["metadata"]["labels"].items()]


def ports(pod: Manifest) -> dict[str, int]:
    return {
        port["name"]: port["containerPort"]
        for one in containers(pod)
        for port in one.get("ports", ())
    }


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command of an image's arguments is given; it is not run."""
    with click.Context(cli, info_name="syncd") as context:
        name, command, rest = cli.resolve_command(context, list(words))
        assert command is not None
        return command.make_context(name, rest, parent=context).params


def size(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


def test_all_files_are_applied_and_on_the_page() -> None:
    files = {file.name for file in FOLDER.iterdir()}
    assert files == {"kustomization.yaml", "Dockerfile", *KUSTOMIZATION["resources"]}
    assert {name for name in files if f"(kubernetes/{name})" not in PAGE} == set()


def test_manifests_have_names_of_their_own() -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in MANIFESTS]
    assert len(set(names)) == len(names)


def test_the_api_takes_the_manifests_and_no_misspelled_field() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install '.[dev]' brings it")
    for one in MANIFESTS:
        schemas.validate(one, schemas.latest_version(), strict=True)
    with pytest.raises(schemas.ValidationError, match="spce"):
        schemas.validate({**one, "spce": {}}, schemas.latest_version(), strict=True)


def test_every_image_has_its_place_and_its_tag() -> None:
    given = {image["name"]: image["newTag"] for image in KUSTOMIZATION["images"]}
    assert {one["image"] for _, one in ALL} == set(given)
    assert all(isinstance(tag, str) for tag in given.values())


def test_no_variable_of_a_service_becomes_a_setting() -> None:
    assert [name for name, pod in PODS.items() if pod["spec"].get("enableServiceLinks", True)] == []


def test_selectors_find_the_pods_that_they_are_for() -> None:
    for kind in ("Deployment", "StatefulSet"):
        for name, one in named(kind).items():
            assert chosen(one["spec"]["selector"]["matchLabels"]) == [PODS[name]]
    for service in named("Service").values():
        (pod,) = chosen(service["spec"]["selector"])
        assert {p["name"]: p["port"] for p in service["spec"]["ports"]}.items() <= ports(
            pod
        ).items()
    for policy in named("NetworkPolicy").values():
        (pod,) = chosen(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"].get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= set(ports(pod).values())
            assert all(chosen(who["podSelector"]["matchLabels"]) for who in rule["from"])
    services = {one["spec"]["serviceName"] for one in named("StatefulSet").values()}
    services |= {pod["spec"]["subdomain"] for pod in PODS.values() if "subdomain" in pod["spec"]}
    assert services <= set(named("Service"))


@pytest.mark.parametrize("name", PODS)
def test_what_a_pod_mounts_is_there(name: str) -> None:
    volumes = {volume["name"]: volume for volume in PODS[name]["spec"]["volumes"]}
    mounted = {m["name"] for one in containers(PODS[name]) for m in one["volumeMounts"]}
    assert mounted == set(volumes)
    for volume in volumes.values():
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] in named("PersistentVolumeClaim")
        elif "configMap" in volume:
            assert volume["configMap"]["name"] in named("ConfigMap")
        else:
            assert "emptyDir" in volume
    for one in containers(PODS[name]):
        probes = [
            one[key] for key in ("startupProbe", "livenessProbe", "readinessProbe") if key in one
        ]
        asked = {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe}
        assert asked <= {port["name"] for port in one.get("ports", ())}


def test_who_writes_to_the_jobs_is_one_user_without_rights_besides() -> None:
    users = set(re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE))
    for name, one in ALL:
        context = {**PODS[name]["spec"]["securityContext"], **one["securityContext"]}
        assert context["allowPrivilegeEscalation"] is False
        mounts = {mount["name"]: mount.get("readOnly", False) for mount in one["volumeMounts"]}
        if not mounts["jobs"]:
            users.add((str(context["runAsUser"]), str(context["runAsGroup"])))
            assert context["runAsNonRoot"]
            assert context["fsGroup"] == context["runAsGroup"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert len(users) == 1
    assert all(one["securityContext"]["readOnlyRootFilesystem"] for _, one in OURS)
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in PODS.values())


def test_the_image_has_a_python_that_tests_were_run_on_and_the_tag_of_this_release() -> None:
    (python,) = re.findall(r"^ARG BASE=python:(\d+\.\d+)-slim$", DOCKERFILE, re.MULTILINE)
    setup = (DOCS.parent / "setup.cfg").read_text(encoding="utf-8")
    assert f"    Programming Language :: Python :: {python}\n" in setup
    (tag,) = [one["newTag"] for one in KUSTOMIZATION["images"] if one["name"] == "syncd"]
    assert tag == __version__


def test_the_jobs_are_at_one_path_and_can_be_shared() -> None:
    (claim,) = named("PersistentVolumeClaim").values()
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    paths = {m["mountPath"] for _, one in ALL for m in one["volumeMounts"] if m["name"] == "jobs"}
    assert paths == {"/shared/jobs"}


def test_the_image_begins_with_syncd_and_its_arguments_are_understood() -> None:
    assert DOCKERFILE.rstrip().endswith('ENTRYPOINT ["syncd"]')
    assert [name for name, one in OURS if "command" in one] == []
    found = {one["args"][0]: parsed(one["args"]) for _, one in OURS}
    assert set(found) == {"run", "follow"}
    assert found["follow"]["server"] == "vllm"
    with pytest.raises(click.UsageError):
        parsed(["follow", "/shared/jobs/qwen-grpo", "--nmae=x"])


def test_the_configuration_is_found_and_can_be_used(tmp_path: Path) -> None:
    ((pod, daemon),) = [(name, one) for name, one in OURS if one["args"][0] == "run"]
    file = parsed(daemon["args"])["config"]
    (volume,) = [v for v in PODS[pod]["spec"]["volumes"] if "configMap" in v]
    (mount,) = [m for m in daemon["volumeMounts"] if m["name"] == volume["name"]]
    assert str(file.parent) == mount["mountPath"]
    text = named("ConfigMap")[volume["configMap"]["name"]]["data"][file.name]
    copy = tmp_path / file.name
    copy.write_text(text, encoding="utf-8")
    checked = invoke("config", "check", copy)
    assert checked.exit_code == 0, checked.output
    assert 'root = "/shared/jobs"' in text


def test_trainer_and_explorers_are_of_one_job_below_the_root() -> None:
    text = " ".join(
        str(word) for _, one in ALL for key in ("command", "args") for word in one.get(key, ())
    )
    assert set(re.findall(r"/shared/jobs/[\w-]+", text)) == {"/shared/jobs/qwen-grpo"}


def test_versions_are_staged_where_the_server_sees_them_and_fit_there() -> None:
    (pod,) = named("StatefulSet")
    (follow,) = [one for name, one in OURS if name == pod]
    told = parsed(follow["args"])
    at = [{m["name"]: m["mountPath"] for m in one["volumeMounts"]} for one in containers(PODS[pod])]
    assert {mounts["stage"] for mounts in at} == {str(told["stage"])}
    (volume,) = [v for v in PODS[pod]["spec"]["volumes"] if v["name"] == "stage"]
    assert told["budget"] < size(volume["emptyDir"]["sizeLimit"])
    assert size(volume["emptyDir"]["sizeLimit"]) < size(follow["resources"]["limits"]["memory"])
    (server,) = [one for one in containers(PODS[pod]) if one is not follow]
    assert told["urls"] == (f"http://127.0.0.1:{ports(PODS[pod])['http']}",)
    assert {"name": "VLLM_SERVER_DEV_MODE", "value": "1"} in server["env"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(
    ("label", "age", "ready"),
    [
        ("step-3-version-2", 0, True),
        ("step-3-version-2", 5, True),
        ("step-3-version-2", 10, False),
        ("step-3-version-2", None, False),
        ("default", 0, False),
        ("syncd-loading-full-step-3-version-2", 0, False),
        (None, 0, False),
    ],
)
def test_an_explorer_is_ready_while_it_is_followed_and_its_server_has_a_version(
    tmp_path: Path, shell: str, label: str | None, age: int | None, ready: bool
) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # http.server names it
            self.send_response(200 if self.path == "/weight_info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"weight_version": label}).encode())

    (probed,) = [one for _, one in ALL if "readinessProbe" in one]
    *_, line = probed["readinessProbe"]["exec"]["command"]
    assert line.split() in [block.split() for block in blocks("kubernetes.md", "sh")]
    (followed,) = [parsed(one["args"]) for _, one in OURS if one["args"][0] == "follow"]
    assert followed["ready"].parent == followed["stage"]  # which both containers see
    file = tmp_path / "ready"
    if age is not None:
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        line = line.replace(str(followed["ready"]), str(file))
        (url,) = followed["urls"]
        line = line.replace(url.removeprefix("http://"), f"127.0.0.1:{server.server_port}")
        assert str(file) in line
        assert str(server.server_port) in line
        answering = Thread(target=server.serve_forever, daemon=True)
        if label is None:
            server.server_close()  # nobody is there
        else:
            answering.start()
        done = subprocess.run([shell, "-c", line], check=False, timeout=60)
        if answering.is_alive():
            server.shutdown()
    assert (done.returncode == 0) is ready


SHELL = [
    pytest.param(script, id=f"{page}-{number}")
    for page, language in (("slurm.md", "bash"), ("kubernetes.md", "sh"))
    for number, script in enumerate(blocks(page, language))
]


@pytest.mark.parametrize("script", SHELL)
def test_what_is_pasted_into_a_shell_is_its_language(script: str) -> None:
    done = completed(["bash", "-n"], input=script, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
