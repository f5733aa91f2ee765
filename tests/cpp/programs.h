// What the test program does besides testing. Each returns an exit status.

#pragma once

#include <string>

namespace programs {

int lse_accuracy();
int benchmark(const std::string &json);  // the file that its figures go to; empty: none

}  // namespace programs
