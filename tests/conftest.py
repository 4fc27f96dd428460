"""How hypothesis draws its examples in this suite."""

import hypothesis

# The same examples every time: a change fails for what it changes, not for the luck of the draw. No deadline: a busy
# machine is not a failure. `--hypothesis-profile=default` looks further.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
