"""Check the Dockerfile and the compose file without a registry: commands, ports, paths, users and settings."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import yaml
from sqlalchemy import make_url

from autosel import settings
from autosel.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "containers.md").read_text()


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    return found


def instruction(name: str) -> str:
    [found] = re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)
    return str(found)


def parsed(words: list[str]) -> dict[str, Any]:
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, words
    return command.make_context(words[0], list(words[1:])).params


def test_both_files_start_the_daemon_with_a_dashboard_on_the_documented_port() -> None:
    daemon = compose()["services"]["daemon"]
    assert json.loads(instruction("ENTRYPOINT")) == ["autosel"]
    for words in json.loads(instruction("CMD")), daemon["command"]:
        assert parsed(words)["tcp"] == "127.0.0.1:8765"
    assert daemon["network_mode"] == "host", "the daemon listens on the loopback interface only"
    assert "http://127.0.0.1:8765" in PAGE
    way, program, *words = daemon["healthcheck"]["test"]
    assert (way, program) == ("CMD", "autosel") and parsed(words)


def test_the_image_installs_the_wheel_of_run_with_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wheel = f"dist/{project['name'].replace('-', '_')}-1.0-py3-none-any.whl"
    assert fnmatch(wheel, instruction("COPY").split()[0])
    everything, kept = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    assert everything == "*" and fnmatch(wheel, kept.removeprefix("!"))
    [extras] = re.findall(r"\[([a-z,]+)\]\"", DOCKERFILE)
    assert {"daemon", "fleet"} <= set(extras.split(",")) <= set(project["optional-dependencies"])
    minor = int(re.findall(r"python:3\.(\d+)-slim", instruction("FROM"))[0])
    assert minor >= int(project["requires-python"].removeprefix(">=3."))


def test_the_home_is_a_volume_of_the_user_who_runs_the_daemon() -> None:
    name, home = instruction("ENV").split("=")
    assert name in {s.variable for s in settings.SETTINGS} and name == "AUTOSEL_HOME"
    assert f"home:{home}" in compose()["services"]["daemon"]["volumes"] and f"`{home}`" in PAGE
    user = instruction("USER")
    assert f"--uid 1000 {user}" in DOCKERFILE and f"-o {user} -g {user} -m 0700 {home}" in DOCKERFILE


def test_the_daemons_ledger_is_the_database_that_compose_starts() -> None:
    services = compose()["services"]
    database, environment = services["ledger"], services["daemon"]["environment"]
    assert set(environment) <= {s.variable for s in settings.SETTINGS}
    assert database["environment"]["POSTGRES_PASSWORD"] in environment["AUTOSEL_DB"]
    url = make_url(re.sub(r"\$\{.*?\}", "secret", environment["AUTOSEL_DB"]))
    assert url.drivername == "postgresql+psycopg" and url.password == "secret"
    assert (url.username, url.database) == tuple(database["environment"][n] for n in ("POSTGRES_USER", "POSTGRES_DB"))
    assert database["ports"] == [f"{url.host}:{url.port}:5432"]
    assert services["daemon"]["depends_on"]["ledger"]["condition"] == "service_healthy" and database["healthcheck"]
    named = [v.partition(":")[0] for service in services.values() for v in service["volumes"]]
    assert sorted(named) == sorted(compose()["volumes"])


def test_the_page_names_services_of_the_compose_file() -> None:
    services = re.findall(r"compose\.yaml exec (\w+) autosel (.*)", PAGE)
    assert services
    for service, words in services:
        assert service in compose()["services"] and parsed(words.split())
