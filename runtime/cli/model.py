"""``forebay model``: the model cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from forebay.runtime.cli.console import print_json, progress_bars, resolve_settings, setting_option

app = typer.Typer(help="Fetch and list models.", rich_markup_mode=None)

CacheDir = Annotated[Path | None, setting_option("cache_dir", "PATH")]
MEGABYTE = 10**6


@app.command()
def fetch(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="A known model, as 'forebay model list' shows them, or a hub's org/name.")
    ],
    cache_dir: CacheDir = None,
    force: Annotated[bool, typer.Option("--force", help="Make it anew although it is there.")] = False,
) -> None:
    """Download a known model, or one of a hub, into the cache, verify it, and print its folder."""
    from forebay.runtime.models import hub, store

    settings = resolve_settings(context, cache_dir=cache_dir)
    get = hub.fetch_from_hub if hub.is_hub_id(name) else store.fetch
    with progress_bars(context) as bars:
        folder = get(name, cache_dir=settings.cache_dir, progress=bars.for_bytes(name), force=force)
    print(folder)


@app.command(name="list")
def list_known(
    context: typer.Context,
    cache_dir: CacheDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List the known models and whether the cache has them."""
    from forebay.runtime.models import store

    settings = resolve_settings(context, cache_dir=cache_dir)
    records = store.list_models(settings.cache_dir)
    if as_json:
        print_json([asdict(record) for record in records])
        return
    for record in records:
        place = record.path if record.state == "cached" else f"fetch: {record.download_bytes // MEGABYTE} MB"
        size = f"{record.size_bytes // MEGABYTE} MB"
        print(f"{record.name:<16} {record.state:<8} {size:>8}  {record.licence}  {record.summary} ({place})")
