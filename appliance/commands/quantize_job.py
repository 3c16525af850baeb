"""Reports a quantize run's events to dashboards: stage, layer, time left, loss."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from appliance.progress.quantize_events import (
    Measuring,
    QuantizeEvent,
    Start,
    StepStarted,
    UnitFinished,
    Written,
)

if TYPE_CHECKING:
    from appliance.progress.jobs import JobFile

QUANTIZING = "quantizing"


def tell_job(job: JobFile, event: QuantizeEvent) -> None:
    match event:
        case StepStarted():
            job.update(event.what, 0, 0)
        case Start():
            done, total = event.units_done, event.units
            job.update("trying the largest layer", 0, 0, parts_done=done, parts_total=total)
        case UnitFinished():
            job.update(
                QUANTIZING,
                event.bytes_done,
                event.bytes_total,
                seconds_left=event.remaining_seconds,
                part=event.name,
                parts_done=event.done,
                parts_total=event.total,
                loss=fmean(event.losses.values()) if event.losses else None,
            )
        case Written():
            job.update("finishing the files", 0, 0)
        case Measuring():
            done, total = event.done, event.total
            stage = f"quality card, {event.stage}"
            job.update(stage, done, total, parts_done=done, parts_total=total)
        case _:
            pass
