"""From objects to files for users: link them, and pack wheels and the C++ API's archive."""
