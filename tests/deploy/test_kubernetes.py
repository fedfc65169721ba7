"""Every overlay of deploy/k8s is valid by the API's schemas, and says of the processes what they say of themselves."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest

from services.common.settings import load
from tests.deploy.manifests import Manifest, mebibytes, rendered
from tests.deploy.stack import AFTER_GRACE_S, DEPLOY, SETTINGS, images, loaded

API_VERSION = "1.31"
OVERLAYS = sorted(path.name for path in (DEPLOY / "k8s" / "overlays").iterdir())
RENDERED: dict[str, list[Manifest]] = {name: rendered(DEPLOY / "k8s" / "overlays" / name) for name in OVERLAYS}
RENDERED["base"] = rendered(DEPLOY / "k8s" / "base")
EVERY = pytest.mark.parametrize("overlay", sorted(RENDERED))
IMAGES = images()
NOT_OF_THE_API = {"keda.sh/v1alpha1"}


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [manifest for manifest in RENDERED[overlay] if manifest["kind"] in kinds]


def workloads(overlay: str) -> dict[str, Any]:
    """Pod specs by name."""
    found = of_kind(overlay, "Deployment", "StatefulSet", "Job")
    return {manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"] for manifest in found}


def processes(overlay: str) -> dict[str, tuple[Any, Any]]:
    """Pod spec and container of each of the four."""
    pods = workloads(overlay)
    return {name: (pods[name], pods[name]["containers"][0]) for name in SETTINGS}


def environment(name: str, container: dict[str, Any]) -> dict[str, str]:
    """What the process sees of ours; a secret's value is an example."""
    given = {e["name"]: e.get("value", "redis://:p@redis:6379/0") for e in container["env"]}
    return {k: v for k, v in {**IMAGES[name].env, **given}.items() if k.startswith("HEADRACE_")}


@EVERY
def test_the_schemas_take_it(overlay: str) -> None:
    """Each manifest is valid, with no field that the API does not have."""
    for manifest in RENDERED[overlay]:
        if manifest["apiVersion"] not in NOT_OF_THE_API:
            kubernetes_validate.validate(manifest, API_VERSION, strict=True)


def test_the_schemas_would_object() -> None:
    """A field that does not exist is found: the test above is not empty."""
    bad = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, API_VERSION, strict=True)


@EVERY
def test_every_variable_is_a_setting(overlay: str) -> None:
    """Each process starts with its variables, and waits for the model that it serves."""
    for name, (pod, container) in processes(overlay).items():
        variables = environment(name, container)
        settings = loaded(name, variables)
        listed = {e["name"] for e in container["env"]}
        assert len(listed) == len(container["env"]), name
        assert not pod["enableServiceLinks"], name
        if name != "gateway":
            gate = pod["initContainers"][0]
            assert {e["name"]: e["value"] for e in gate["env"]} == {"HEADRACE_MODEL": settings.model.model}
            assert gate["image"] == container["image"] or overlay == "gpu"


@EVERY
def test_ports_and_probes(overlay: str) -> None:
    """Ports and probes are those of the image; services lead to them."""
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay, "Service")}
    for name, (_, container) in processes(overlay).items():
        server = loaded(name, environment(name, container)).server
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": server.port, "metrics": server.metrics_port}
        assert container["readinessProbe"]["grpc"]["port"] == server.port
        assert container.get("startupProbe", container["readinessProbe"])["grpc"]["port"] == server.port
        # Health as liveness would kill a process that waits for another, or that drains.
        assert container["livenessProbe"]["tcpSocket"] == {"port": "grpc"}
        assert {p["port"] for p in services[name]["ports"]} == set(ports.values())
        assert services[name]["selector"] == {"app.kubernetes.io/component": name}


@EVERY
def test_a_stop_waits_for_the_process(overlay: str) -> None:
    """The kubelet kills nobody who is still within preStop, the grace period and what follows it."""
    for name, (pod, container) in processes(overlay).items():
        before_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        grace_s = loaded(name, environment(name, container)).server.grace_s
        assert pod["terminationGracePeriodSeconds"] >= before_s + grace_s + AFTER_GRACE_S, name


@EVERY
def test_addresses_lead_somewhere(overlay: str) -> None:
    """The gateway's peers are services here, and its engines are as many as there may be."""
    _, container = processes(overlay)["gateway"]
    peers = loaded("gateway", environment("gateway", container)).peers
    assert (peers.tokenizer_address, peers.stream_address) == ("tokenizer:50051", "stream:50052")
    most = max(
        [m["spec"]["replicas"] for m in of_kind(overlay, "StatefulSet")]
        + [
            m["spec"].get("maxReplicas") or m["spec"]["maxReplicaCount"]
            for m in of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject")
            if m["spec"]["scaleTargetRef"]["name"] == "engine"
        ]
    )
    assert len(peers.engine_addresses) >= most
    assert peers.engine_addresses == tuple(f"engine-{i}.engine:50053" for i in range(len(peers.engine_addresses)))


@EVERY
def test_pods_are_locked(overlay: str) -> None:
    """Nobody is root, gains rights, writes to the root file system, or talks to the API server; memory is bounded."""
    for name, pod in workloads(overlay).items():
        context = pod["securityContext"]
        assert context["runAsNonRoot"], name
        assert context["runAsUser"] > 0, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"] + pod.get("initContainers", []):
            locked = container["securityContext"]
            assert locked["readOnlyRootFilesystem"], name
            assert locked["allowPrivilegeEscalation"] is False, name
            assert locked["capabilities"] == {"drop": ["ALL"]}, name
            assert mebibytes(container["resources"]["limits"]["memory"]) > 0
            for mount in container["volumeMounts"]:
                assert mount.get("readOnly") or mount["name"] in ("tmp", "data") or name == "model", (name, mount)


@EVERY
def test_the_pool_fits_the_limit(overlay: str) -> None:
    """KV pool and a gigabyte for torch, weights and activations of the default model stay below the memory limit.

    On a GPU the pool is in the GPU's memory, and of the size that this has room for.
    """
    _, container = processes(overlay)["engine"]
    settings = loaded("engine", environment("engine", container)).engine
    pool = settings.kv_memory_bytes
    assert settings.device == ("cuda" if overlay == "gpu" else "auto")
    if overlay == "gpu":
        assert pool is None
        return
    assert pool / 2**20 + 1024 <= mebibytes(container["resources"]["limits"]["memory"])


@EVERY
def test_every_process_has_a_disruption_budget(overlay: str) -> None:
    """An eviction never takes the last pod of a kind that has two, nor two engines."""
    budgets = {m["metadata"]["name"]: m["spec"] for m in of_kind(overlay, "PodDisruptionBudget")}
    assert set(budgets) == set(SETTINGS)
    replicas = {m["metadata"]["name"]: m["spec"]["replicas"] for m in of_kind(overlay, "Deployment", "StatefulSet")}
    for name, budget in budgets.items():
        assert budget["selector"]["matchLabels"] == {"app.kubernetes.io/component": name}
        if "minAvailable" in budget:
            assert replicas[name] > budget["minAvailable"], name


@EVERY
def test_policies_allow_the_calls_alone(overlay: str) -> None:
    """Ingress and egress policies hold the same edges: those of the architecture."""
    edges = {("gateway", "tokenizer"), ("gateway", "stream"), ("gateway", "engine"), ("gateway", "redis")}
    edges |= {("stream", "engine"), ("stream", "redis")}
    into, out_of = set(), set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        component = policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component")
        for rule in policy["spec"].get("ingress", []):
            into |= {(peer, component) for peer in named(rule["from"])}
        for rule in policy["spec"].get("egress", []):
            out_of |= {(component, peer) for peer in named(rule.get("to", []))}
    assert into == out_of == edges
    denied = next(p["spec"] for p in of_kind(overlay, "NetworkPolicy") if p["metadata"]["name"] == "default-deny")
    assert denied == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def named(peers: list[dict[str, Any]]) -> set[str]:
    labels = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in peers]
    return {label["app.kubernetes.io/component"] for label in labels if label}


def test_engines_are_scaled_by_one_thing() -> None:
    """Queue length in one overlay, backlog in the other, by names that exist."""
    queue = next(m for m in of_kind("scale", "HorizontalPodAutoscaler") if m["metadata"]["name"] == "engine")
    metric = queue["spec"]["metrics"][0]["pods"]["metric"]
    rules = (DEPLOY / "observability" / "recording.rules.yml").read_text()
    alerts = (DEPLOY / "observability" / "alerts.rules.yml").read_text()
    assert f'{metric["name"]}{{state="{metric["selector"]["matchLabels"]["state"]}"}}' in alerts
    backlog = of_kind("scale-keda", "ScaledObject")[0]["spec"]["triggers"][0]["metadata"]["query"]
    assert f"record: {backlog}\n" in rules
    assert not [m for m in of_kind("scale-keda", "HorizontalPodAutoscaler") if m["metadata"]["name"] == "engine"]


def test_engines_use_the_cores_they_have() -> None:
    """With a limit on cores, torch has that many threads."""
    _, container = processes("cpu")["engine"]
    engine = load(SETTINGS["engine"], environment("engine", container), "engine").engine
    assert str(engine.threads) == container["resources"]["limits"]["cpu"]
