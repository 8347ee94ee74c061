"""Trackers: where the figures of a run are shown besides its folder; one file a tracker."""

from relax_server.trackers.base import TrackedRun, Tracker
from relax_server.trackers.delivery import Trackers
from relax_server.trackers.registry import make_trackers, register_tracker
from relax_server.trackers.samples import SampleAnswer, SampleMedia

__all__ = ["SampleAnswer", "SampleMedia", "TrackedRun", "Tracker", "Trackers", "make_trackers", "register_tracker"]
