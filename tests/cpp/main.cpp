// flash_attention_v2_tests [GoogleTest's options]
// flash_attention_v2_tests --benchmark [FILE.json]
// flash_attention_v2_tests --lse-accuracy
//
// FLASH_ATTENTION_V2_EMULATED=1: kernels are interpreted. Problems are small then, and tests that need a real
// GPU are skipped.

#include <cstdio>
#include <string>

#include "harness.h"
#include "programs.h"

extern "C" int c_program_works(void);

TEST(Header, IsC) { EXPECT_EQ(c_program_works(), 1); }

int main(int argc, char **argv) {
    const std::string first = argc > 1 ? argv[1] : "";
    if (first == "--benchmark") { return programs::benchmark(argc > 2 ? argv[2] : ""); }
    if (first == "--lse-accuracy") { return programs::lse_accuracy(); }
    testing::InitGoogleTest(&argc, argv);
    if (argc > 1) {
        std::fprintf(
            stderr, "unknown argument %s; there are --benchmark, --lse-accuracy and GoogleTest's\n", argv[1]);
        return 2;
    }
    std::printf("library %s; GPUs: %d%s; kernels:\n%s\n", flash_attention_v2_version(), harness::devices(),
        harness::emulated() ? " (emulated)" : "", flash_attention_v2_kernels());
    const int status = RUN_ALL_TESTS();
    const testing::UnitTest &all = *testing::UnitTest::GetInstance();
    if (all.skipped_test_count() > 0) {
        std::printf(
            "%d tests were skipped: they show nothing. Each says why above.\n", all.skipped_test_count());
    }
    return status;
}
