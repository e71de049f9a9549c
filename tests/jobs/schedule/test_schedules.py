from datetime import UTC, datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from cairn.jobs.schedule.schedules import Schedule, ScheduleFile
from cairn.pipeline.errors import ConfigError

VIENNA = ZoneInfo("Europe/Vienna")
INGEST = ("ingest", "articles/", "--collection", "handbook")


def nightly(**changes: object) -> Schedule:
    return Schedule(
        **{"name": "nightly", "cron": "30 2 * * *", "time_zone": "Europe/Vienna", "run": INGEST, **changes}
    )


def fires(schedule: Schedule, after: datetime, until: datetime) -> list[str]:
    found: list[str] = []
    while (after := schedule.next_fire(after)) <= until:
        found.append(after.astimezone(schedule.zone).isoformat(timespec="minutes"))
    return found


@pytest.mark.parametrize(
    ("month", "days", "expected"),
    [
        pytest.param(
            3, (28, 30), ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"], id="skipped: right after"
        ),
        pytest.param(10, (24, 26), ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"], id="twice: once"),
    ],
)
def test_time_at_which_clocks_change_fires_once(
    month: int, days: tuple[int, int], expected: list[str]
) -> None:
    after, until = (datetime(2026, month, day, 12, tzinfo=VIENNA) for day in days)
    assert fires(nightly(), after, until) == expected


@pytest.mark.parametrize("minute", [0, 10, 29, 30, 31, 59])
def test_moment_in_the_hour_that_comes_twice_has_its_fire_behind_it(minute: int) -> None:
    second_time = datetime(2026, 10, 25, 2, minute, tzinfo=VIENNA, fold=1).astimezone(UTC)
    assert nightly().next_fire(second_time).isoformat() == "2026-10-26T01:30:00+00:00"
    assert nightly().latest_fire(second_time).isoformat() == "2026-10-25T00:30:00+00:00"


def test_fire_every_half_hour_goes_on_through_the_hour_that_comes_twice() -> None:
    found = fires(
        nightly(cron="*/30 * * * *"),
        datetime(2026, 10, 25, 1, 45, tzinfo=VIENNA),
        datetime(2026, 10, 25, 3, 0, tzinfo=VIENNA),
    )
    expected = "02:00+02:00 02:30+02:00 02:00+01:00 02:30+01:00 03:00+01:00"
    assert [moment[11:] for moment in found] == expected.split()
    moment = datetime(2026, 11, 21, 1, 30, tzinfo=UTC)
    assert nightly().latest_fire(moment) == moment
    assert nightly().next_fire(moment) == datetime(2026, 11, 22, 1, 30, tzinfo=UTC)


def test_schedule_file_is_read_in_its_order(tmp_path: Path) -> None:
    file = ScheduleFile(tmp_path / "schedules.toml")
    assert file.read() == {}
    file.path.write_text(
        """
[nightly] # after the backup
cron = "30 2 * * *"
time-zone = "Europe/Vienna"
run = ["ingest", "articles/", "--collection", "handbook"]
since = 2026-11-21T09:00:00Z
folder = "/srv/corpus"

[hourly]
cron = "0 * * * *"
run = ["ingest", "articles/", "--collection", "handbook"]
"""
    )
    hourly = Schedule(name="hourly", cron="0 * * * *", run=INGEST)
    since = datetime(2026, 11, 21, 9, tzinfo=UTC)
    assert file.read() == {"nightly": nightly(since=since, folder=Path("/srv/corpus")), "hourly": hourly}
    assert list(file.read()) == ["nightly", "hourly"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cron": "every night"}, "'every night'"),
        ({"cron": "61 2 * * *"}, "bad minute"),
        ({"cron": "0 30 2 * * *"}, "'0 30 2 * * *'"),
        ({"cron": "0 0 31 2 *"}, "that come to pass"),
        ({"time_zone": "Mars/Base"}, "'Mars/Base'"),
        ({"time_zone": "../etc/passwd"}, "IANA"),
        *(
            ({"name": name}, "name must match")
            for name in ("../x", "", "-rf", "$(touch y)", "a\nb", "a" * 64)
        ),
        ({"run": ()}, "got 'nothing'"),
        *(
            ({"run": (verb, "articles/")}, "must run one of ingest, plan, submit")
            for verb in ("rm", "--help", "ingest; touch y", "/bin/sh", "../ingest", " ingest", "serve")
        ),
        ({"since": datetime(2026, 11, 21, 9)}, "must say its offset"),  # noqa: DTZ001 (what a hand may write)
    ],
)
def test_schedule_that_cannot_run_is_refused_in_one_sentence(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        nightly(**changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        "[nightly",
        "nightly = 3",
        '[nightly]\ncron = "30 2 * * *"',
        '[nightly]\ncron = "30 2 * * *"\nrun = "ingest a"',
        '[nightly]\ncron = 5\nrun = ["ingest", "a"]',
        '[nightly]\ncron = "30 2 * * *"\nrun = ["ingest", "a"]\nsince = 2026-11-21',
        '[nightly]\ncron = "30 2 * * *"\nrun = ["ingest", "a"]\ncoalesce = true',
        '[nightly]\ncron = "30 2 * * *"\nrun = ["ingest", "a"]\n"__class__" = "x"',
        '[nightly]\ncron = "never"\nrun = ["ingest", "a"]',
    ],
)
def test_schedule_file_with_a_fault_is_refused_in_one_sentence(tmp_path: Path, content: str) -> None:
    file = ScheduleFile(tmp_path / "schedules.toml")
    file.path.write_text(content)
    with pytest.raises(ConfigError, match="schedule"):
        file.read()
