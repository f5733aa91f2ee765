"""The one profile of hypothesis, which each suite that draws examples loads: none fails because a machine is slow."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
