"""The launch scripts are clean, and the manifest says one thing in all its places."""

import re
import shutil
import subprocess

import pytest
import yaml

from tests.launch.corpus import ROOT

SCRIPTS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "launch").glob("*.s*"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_reads_it(script):
    subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    check = subprocess.run(
        ["shellcheck", "-x", *SCRIPTS], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout


def test_kubernetes_manifest():
    jobset = yaml.safe_load((ROOT / "launch/kubernetes.yaml").read_text())
    job = jobset["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    command = container["command"][-1]
    assert f"--nnodes {spec['parallelism']} " in command
    assert spec["completions"] == spec["parallelism"]
    # JobSet names pods jobset-job-replica-index, in a subdomain of the jobset's name.
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert f"--rdzv-endpoint {name}-{job['name']}-0-0.{name}:{port}" in command
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    for path in re.findall(r"configs/\S+", command):
        assert (ROOT / path).exists()
    save, load = (re.search(rf"--{flag} (\S+)", command) for flag in ("save", "load"))
    assert save and load and save[1] == load[1], "a restarted pod must resume what it saved"
