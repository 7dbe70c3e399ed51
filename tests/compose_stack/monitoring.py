"""Prometheus as the stack runs it: targets are up, and every query of dashboard and rules has series."""

import json
import math
import re
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from compose_stack.shell import FailedError, wait_until

URL = "http://127.0.0.1:9090"
JOBS = {"kvplane-cache", "kvplane-compute", "prometheus"}
SCRAPE_SECONDS = 5


def wait_targets(seconds: float = 60) -> None:
    """Wait until all targets have been scraped. Raises `FailedError`."""

    def up() -> bool:
        try:
            targets = _get("/api/v1/targets")["activeTargets"]
        except FailedError:
            return False  # it is only starting
        return {each["labels"]["job"] for each in targets if each["health"] == "up"} == JOBS

    wait_until(up, f"Prometheus has scraped {', '.join(sorted(JOBS))}", seconds, every=1)


def dashboard_queries(root: Path) -> dict[str, str]:
    """The dashboard's queries by panel and series, with the variable `pool` at All."""
    board = json.loads((root / "deploy/grafana/dashboards/kvplane.json").read_text())
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$pool", ".*")
        for panel in board["panels"]
        for target in panel["targets"]
    }


def rule_queries(root: Path) -> dict[str, str]:
    """The recording rules, and for every alert the series that it looks at: a healthy stack has no more of it."""
    queries = {}
    for name in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((root / "deploy/prometheus" / name).read_text())["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    queries[rule["record"]] = rule["expr"]
                    continue
                for metric in sorted(set(re.findall(r"\b(?:kvplane[a-z0-9_:]*|up)\b(?=[\s{\[)]|$)", rule["expr"]))):
                    queries[f"{rule['alert']}: {metric}"] = metric
    return queries


def check_queries(queries: dict[str, str], seconds: float = 60) -> int:
    """Every query has finite values, by and by; returns how many series they have together. Raises `FailedError`."""
    missing = dict(queries)
    total = 0

    def answered() -> bool:
        nonlocal total
        for name, query in list(missing.items()):
            values = [float(each["value"][1]) for each in _get("/api/v1/query", query=query)["result"]]
            if any(math.isfinite(value) for value in values):
                total += len(values)
                del missing[name]
        return not missing

    try:
        wait_until(answered, "all queries have series", seconds, every=2)
    except FailedError as error:
        lines = "\n".join(f"  {name}: {query}" for name, query in missing.items())
        raise FailedError(f"{error}; none for:\n{lines}") from error
    return total


def value(query: str) -> float:
    """The sum over the series of a query; NaN for none."""
    found = _get("/api/v1/query", query=query)["result"]
    return sum(float(each["value"][1]) for each in found) if found else math.nan


def check_rules() -> tuple[int, list[str]]:
    """All rules are evaluated without an error; returns their number and the names of alerts that fire or are about to.
    Raises `FailedError`."""
    rules = [rule for group in _get("/api/v1/rules")["groups"] for rule in group["rules"]]
    bad = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    if bad:
        raise FailedError(f"rules cannot be evaluated: {bad}")
    return len(rules), [rule["name"] for rule in rules if rule.get("state") in ("firing", "pending")]


def _get(path: str, **parameters: str) -> Any:
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    try:
        with urllib.request.urlopen(f"{URL}{path}{query}", timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError as error:
        raise FailedError(f"Prometheus does not answer {path}{query}: {error}") from error
