// Marks what libraries beside the core's call of it: all else is hidden.

#pragma once

#define FORK_SHOWN __attribute__((visibility("default")))
