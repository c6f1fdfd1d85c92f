"""``flowrl score`` and ``flowrl serve-rewards``: rewards alone, here and over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from flowrl.cli import options
from flowrl.cli.output import show_or_write
from flowrl.core.errors import ConfigError

COUNT, TOLERANCE = 64, 1e-4  # of the self-test


class ScoringJob(NamedTuple):
    """Which images, which rewards, and how many images at once."""

    images: list[Path]
    reward: list[str]
    config: str | None
    changes: list[str]
    prompt: str | None
    prompts: str | None
    batch: int
    plugin: list[str]


class ScoreFiles(NamedTuple):
    """Where scores go beside the table, and in what order."""

    json: Path | None
    csv: Path | None
    grid: Path | None
    sort: str | None


Images = Annotated[
    list[Path],
    typer.Argument(
        default_factory=list,
        show_default=False,
        metavar="IMAGE",
        help="PNG, JPEG or WebP files, or folders of them",
    ),
]
Reward = Annotated[
    list[str],
    typer.Option(
        default_factory=list,
        show_default=False,
        metavar="NAME",
        help="as `fn` of a config; repeatable",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="use all rewards of a config instead", autocompletion=options.complete_config
    ),
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="of all images")]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='a record per image: by its key "file" or "image", or in order',
    ),
]
Batch = Annotated[int, typer.Option(help="images shown to a reward at once")]
Split = Annotated[
    bool,
    typer.Option("--split", help="show the images of a prompt in several batches to any reward"),
]
Csv = Annotated[Path | None, typer.Option(metavar="PATH", help="also write the scores here")]
Sort = Annotated[str | None, typer.Option(metavar="NAME", help="the best by this reward first")]
Grid = Annotated[
    Path | None, typer.Option(metavar="PNG", help="draw the best and the worst images")
]
Selftest = Annotated[
    bool,
    typer.Option("--selftest", help="test the rewards, by default on rendered scenes"),
]
Count = Annotated[
    int | None, typer.Option(help=f"self-test: images used at most; default: {COUNT}")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        help=f"self-test: differences up to this share are rounding; default: {TOLERANCE:g}"
    ),
]
Skip = Annotated[
    list[str],
    typer.Option(
        default_factory=list,
        show_default=False,
        metavar="DAMAGE",
        help="self-test: leave out blur, noise or prompt; NAME.DAMAGE for one reward",
    ),
]


def score(
    images: Images,
    *,
    reward: Reward,
    config: Config = None,
    changes: options.Set,
    profile: options.Profile = None,
    prompt: Prompt = None,
    prompts: Prompts = None,
    batch: Batch = 32,
    split: Split = False,
    json: options.Json = None,
    csv: Csv = None,
    sort: Sort = None,
    grid: Grid = None,
    selftest: Selftest = False,
    count: Count = None,
    tolerance: Tolerance = None,
    skip: Skip,
    plugin: options.Plugins,
) -> int:
    """Score any images with rewards, or test whether the rewards can be trusted (--selftest)."""
    if profile is not None and config is None:
        raise ConfigError("--profile belongs to --config, whose rewards it fits to a card")
    if config is not None:
        changes = options.fitted(config, changes, plugin, profile)
    # a self-test gives no scores and a scoring tests nothing: each refuses the other's options
    asked = ScoringJob(images, reward, config, changes, prompt, prompts, batch, plugin)
    if selftest:
        if csv or grid or split or sort is not None:
            raise ConfigError(
                "--selftest scores nothing of yours: leave out --csv, --grid, --split and --sort"
            )
        return _test(
            asked,
            COUNT if count is None else count,
            TOLERANCE if tolerance is None else tolerance,
            skip,
            json,
        )
    if not images or count is not None or tolerance is not None or skip:
        raise ConfigError(
            "score: expected images or folders; --count, --tolerance and --skip belong to "
            "--selftest"
        )
    return _score(asked, split, ScoreFiles(json, csv, grid, sort))


def _score(asked: ScoringJob, split: bool, files: ScoreFiles) -> int:
    """Score images and write what is asked for -> 0."""
    from flowrl.core.files import is_stdout
    from flowrl.core.prompts import check_records
    from flowrl.evaluation.image_files import find_images, match_prompts
    from flowrl.evaluation.score_images import bar, make_rewards, prompted_images, score_images
    from flowrl.evaluation.scorecard import scorecard, scorecard_table

    # images with their prompts, and the rewards
    images = find_images(asked.images)
    words = match_prompts(images, asked.prompt, asked.prompts)
    rewards, calls = make_rewards(asked.reward, asked.config, asked.changes, asked.plugin)
    if files.sort is not None and files.sort not in rewards:
        raise ConfigError(
            f"--sort: expected one of the rewards {', '.join(rewards)}, got {files.sort!r}"
        )
    check_records(words.prompts, rewards)
    # the scores
    noted: dict[str, dict[str, None]] = {}
    items = prompted_images(images, words.prompts, noted)
    with bar(len(items) * len(rewards), "scoring") as progress:
        scored = score_images(
            rewards,
            items,
            batch=asked.batch,
            split=split,
            has_prompts=words.has_prompts,
            progress=progress,
        )
    # table, notes and files
    card = scorecard(items, scored, words.has_prompts, files.sort)
    notes = {what: list(names) for what, names in noted.items()}
    lines = [f"{what}: {_some(names, len(items))}" for what, names in notes.items()]
    if words.unused:
        where = words.prompts.path
        lines.append(f"{where}: {words.unused} records name images that were not given")
    show_or_write(
        lambda width: "\n".join([scorecard_table(card, width=width), *lines]),
        {"rewards": calls, **card, "notes": notes},
        files.json,
        # a file that goes to standard output goes there alone
        silent=any(file is not None and is_stdout(file) for file in (files.csv, files.grid)),
    )
    _save(files, card, items, scored, list(rewards))
    return 0


def _some(names: list[str], total: int) -> str:
    more = ", ..." if len(names) > 3 else ""
    return f"{len(names)} of {total} ({', '.join(names[:3])}{more})"


def _save(
    files: ScoreFiles, card: dict[str, Any], items: Any, scored: Any, names: list[str]
) -> None:
    from flowrl.evaluation.image_grids import save_page
    from flowrl.evaluation.scorecard import best_and_worst, write_csv

    if files.csv:
        write_csv(files.csv, card)
    if files.grid:
        chosen = [files.sort] if files.sort else names
        save_page(best_and_worst(items, scored, chosen), files.grid)


def _test(
    asked: ScoringJob, count: int, tolerance: float, skip: list[str], json: Path | None
) -> int:
    """Test every reward -> 1 if one is broken, else 0."""
    from flowrl.evaluation.reward_tests.selftest import broken, selftest, selftest_table
    from flowrl.evaluation.score_images import bar, make_rewards

    # images to test with: one's own, or rendered scenes
    items, has_prompts = _test_images(asked, count)
    rewards, calls = make_rewards(asked.reward, asked.config, asked.changes, asked.plugin)
    left_out = _skipped(skip, list(rewards))
    rows = []
    # every reward is asked, also after one was found broken
    for name, reward in rewards.items():
        with bar(None, f"testing {name}") as progress:
            rows += selftest(
                name,
                reward,
                items,
                batch=asked.batch,
                tolerance=tolerance,
                skip=left_out[name],
                has_prompts=has_prompts,
                progress=progress,
            )
    checks = [row._asdict() for row in rows]
    found = {"rewards": calls, "checks": checks}
    show_or_write(lambda width: selftest_table(rows, width=width), found, json)
    return 1 if broken(rows) else 0


def _test_images(asked: ScoringJob, count: int) -> tuple[Any, bool]:
    """Take up to `count` images, evenly spread over those that were named, or rendered scenes ->
    (images, whether they have prompts)."""
    from flowrl.evaluation.image_files import find_images, match_prompts
    from flowrl.evaluation.reward_tests.selftest import load_once, rendered
    from flowrl.evaluation.score_images import prompted_images

    if asked.images:
        images = find_images(asked.images)
        words = match_prompts(images, asked.prompt, asked.prompts)
        items = prompted_images(images, words.prompts, {})
        step = -(-len(items) // max(1, count))
        return load_once(items[::step]), words.has_prompts
    if asked.prompt is not None or asked.prompts:
        raise ConfigError(
            "--selftest on scenes of its own brings their prompts: leave out --prompt and --prompts"
        )
    return rendered(count), True


def _skipped(skip: list[str], names: list[str]) -> dict[str, list[str]]:
    """Return the damages that are left out of each reward's test."""
    strange = [text for text in skip if "." in text and text.partition(".")[0] not in names]
    if strange:
        raise ConfigError(f"--skip {strange[0]}: expected a reward of {', '.join(names)}")
    return {
        name: [
            text.removeprefix(f"{name}.")
            for text in skip
            if "." not in text or text.startswith(f"{name}.")
        ]
        for name in names
    }


Host = Annotated[str, typer.Option(help="address to listen on")]
Port = Annotated[int, typer.Option(help="0 = a free one")]
TokenEnv = Annotated[
    str, typer.Option(metavar="NAME", help="environment variable with the clients' token")
]
MaxMb = Annotated[int, typer.Option(help="MiB of one request")]
MaxImages = Annotated[int, typer.Option(help="images of one request")]
MaxHeldMb = Annotated[int, typer.Option(help="MiB of decoded images of all requests in hand")]
MaxWaitMs = Annotated[float, typer.Option(help="wait for others to join")]
AtOnce = Annotated[int, typer.Option(help="join requests up to N images")]


def serve_rewards(
    config: options.ConfigName,
    *,
    overrides: options.Overrides,
    changes: options.Set,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    token_env: TokenEnv = "",
    max_mb: MaxMb = 256,
    max_images: MaxImages = 256,
    max_held_mb: MaxHeldMb = 3072,
    max_wait_ms: MaxWaitMs = 5.0,
    batch: AtOnce = 64,
    profile: options.Profile = None,
    plugin: options.Plugins,
    json: options.Json = None,
) -> None:
    """Host a config's rewards over HTTP; nothing else of the config is used."""
    from flowrl.core.shipped_files import import_rewards

    import_rewards("remote.server").serve(
        options.load_fitted(config, [*overrides, *changes], plugin, profile),
        host=host,
        port=port,
        token_env=token_env,
        max_mb=max_mb,
        max_images=max_images,
        max_held_mb=max_held_mb,
        max_wait_ms=max_wait_ms,
        batch=batch,
        json=json,
    )
