// --benchmark: time and memory over length, beside attention that is written with cuBLAS
// (plain_attention.cu). Both compute the same, which is checked first.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>

#include "harness.h"
#include "programs.h"

#ifndef HAS_CUBLAS

int programs::benchmark(const std::string &) {
    std::fprintf(stderr,
        "this program was built without what it measures against: give CMake a CUDA toolkit with nvcc and "
        "cuBLAS (CUDAToolkit_ROOT, CMAKE_CUDA_COMPILER)\n");
    return 2;
}

#else

#include "plain_attention.h"

namespace programs {

namespace {

using namespace harness;

constexpr int kHeads = 16, kDim = 64, kTokens = 16384;  // of all sequences together

size_t free_memory() {
    size_t free = 0, whole = 0;
    cudaDeviceSynchronize();
    cudaMemGetInfo(&free, &whole);
    return free;
}

// Milliseconds of one run: the median.
double milliseconds(const std::function<bool()> &run) {
    constexpr int kRuns = 21, kEach = 3;
    cudaEvent_t before = nullptr, after = nullptr;
    cudaEventCreate(&before);
    cudaEventCreate(&after);
    std::vector<float> times;
    bool works = run();  // warm
    for (int i = 0; works && i < kRuns; ++i) {
        cudaEventRecord(before, nullptr);
        for (int j = 0; j < kEach; ++j) { works = works && run(); }
        cudaEventRecord(after, nullptr);
        float time = 0;
        works = works && cudaEventSynchronize(after) == cudaSuccess
            && cudaEventElapsedTime(&time, before, after) == cudaSuccess;
        times.push_back(time / kEach);
    }
    cudaEventDestroy(before);
    cudaEventDestroy(after);
    if (!works) { return NAN; }
    std::sort(times.begin(), times.end());
    return double(times[kRuns / 2]);
}

// Microseconds of the host's that one call takes: few enough calls that none waits for the GPU.
double host_microseconds(const std::function<bool()> &run) {
    constexpr int kRuns = 21, kEach = 100;
    std::vector<double> times;
    bool works = run();  // warm
    for (int i = 0; works && i < kRuns; ++i) {
        cudaDeviceSynchronize();
        const auto before = std::chrono::steady_clock::now();
        for (int j = 0; j < kEach; ++j) { works = works && run(); }
        const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - before;
        times.push_back(time.count() / kEach);
    }
    cudaDeviceSynchronize();
    if (!works) { return NAN; }
    std::sort(times.begin(), times.end());
    return times[kRuns / 2];
}

struct Host {
    double forward, backward;  // microseconds
};

Host measure_host() {
    Shape shape;
    shape.d = kDim;
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    return {host_microseconds([&] { return calls.run_forward() == cudaSuccess; }),
        host_microseconds([&] { return calls.run_backward() == cudaSuccess; })};
}

struct Figures {
    int length;
    bool causal;
    double forward, backward, plain_forward, plain_backward;  // milliseconds; NaN: no memory
    double memory, plain_memory;                              // MiB besides inputs, results and lse
};

// Memory that may be missing.
struct Room {
    explicit Room(size_t bytes) {
        missing = cudaMalloc(&at, bytes) != cudaSuccess ? (cudaGetLastError(), true) : false;
    }
    ~Room() { cudaFree(at); }
    Room(const Room &) = delete;
    Room &operator=(const Room &) = delete;
    half *half_at() const { return static_cast<half *>(at); }
    void *at = nullptr;
    bool missing = false;
};

bool same_results(const Bits &ours, const Bits &others) {
    const std::vector<float> a = numbers(ours, kHalf), b = numbers(others, kHalf);
    for (size_t i = 0; i < a.size(); ++i) {
        if (!(std::abs(a[i] - b[i]) < 0.05f)) { return false; }
    }
    return true;
}

bool measure(Figures &figures, cublasHandle_t blas) {
    Shape shape;
    shape.b = std::max(1, kTokens / figures.length);
    shape.h = shape.h_k = kHeads;
    shape.d = kDim;
    shape.len_q = shape.len_k = figures.length;
    shape.causal = figures.causal;
    shape.heads_first = true;  // as cuBLAS has it
    const Inputs inputs = Inputs::draw(shape);
    const Calls calls(inputs);
    const auto at = [](const flash_attention_v2_tensor &tensor) { return static_cast<half *>(tensor.data); };
    flash_attention_v2_cleanup();
    const size_t free_before = free_memory();
    figures.forward = milliseconds([&] { return calls.run_forward() == cudaSuccess; });
    figures.backward = milliseconds([&] { return calls.run_backward() == cudaSuccess; });
    figures.memory = double(free_before - free_memory()) / (1 << 20);
    const Results ours = calls.results();
    flash_attention_v2_cleanup();
    calls.poison();

    const plain::Size size{shape.b, shape.h, figures.length, shape.d, figures.causal};
    const size_t free_again = free_memory();
    const Room probabilities(size.scores() * sizeof(half)), by_scores(size.scores() * sizeof(half));
    figures.plain_forward = figures.plain_backward = figures.plain_memory = NAN;
    if (probabilities.missing || by_scores.missing) { return true; }
    const auto &f = calls.forward;
    const auto &b = calls.backward;
    figures.plain_forward = milliseconds([&] {
        return plain::forward(blas, size, at(f.q), at(f.k), at(f.v), at(f.out), probabilities.half_at());
    });
    figures.plain_backward = milliseconds([&] {
        return plain::backward(blas, size, at(f.q), at(f.k), at(f.v), at(b.dout), at(b.dq), at(b.dk),
            at(b.dv), probabilities.half_at(), by_scores.half_at());
    });
    figures.plain_memory = double(free_again - free_memory()) / (1 << 20);
    const Results others = calls.results();
    return same_results(ours.out, others.out) && same_results(ours.dq, others.dq)
        && same_results(ours.dv, others.dv);
}

void write(const std::string &path, const char *gpu, const Host &host, const std::vector<Figures> &all) {
    const std::string part = path + ".part";
    std::FILE *const file = std::fopen(part.c_str(), "w");
    if (file == nullptr) {
        std::perror(part.c_str());
        return;
    }
    const auto number = [](double value) {
        char digits[32];
        std::snprintf(digits, sizeof(digits), "%.4f", value);
        return std::isnan(value) ? std::string("null") : std::string(digits);
    };
    std::fprintf(file,
        "{\n \"gpu\": \"%s\",\n \"library\": \"%s\",\n \"heads\": %d,\n \"head_dim\": %d,\n \"tokens\": %d,\n"
        " \"host_us\": {\"forward\": %s, \"backward\": %s},\n \"cases\": [",
        gpu, flash_attention_v2_version(), kHeads, kDim, kTokens, number(host.forward).c_str(),
        number(host.backward).c_str());
    for (size_t i = 0; i < all.size(); ++i) {
        const Figures &f = all[i];
        std::fprintf(file,
            "%s\n  {\"length\": %d, \"causal\": %s, \"forward_ms\": %s, \"backward_ms\": %s, "
            "\"plain_forward_ms\": %s, \"plain_backward_ms\": %s, \"memory_mib\": %s, "
            "\"plain_memory_mib\": %s}",
            i ? "," : "", f.length, f.causal ? "true" : "false", number(f.forward).c_str(),
            number(f.backward).c_str(), number(f.plain_forward).c_str(), number(f.plain_backward).c_str(),
            number(f.memory).c_str(), number(f.plain_memory).c_str());
    }
    std::fprintf(file, "\n ]\n}\n");
    if (std::fclose(file) != 0 || std::rename(part.c_str(), path.c_str()) != 0) { std::perror(path.c_str()); }
}

}  // namespace

int benchmark(const std::string &json) {
    if (devices() == 0 || emulated()) {
        std::fprintf(stderr, "no GPU to measure on\n");
        return 2;
    }
    if (!has_kernels({1, 1, 1, kDim}, true)) {
        std::fprintf(stderr, "this build has no kernels for head dim %d in float16\n", kDim);
        return 2;
    }
    cudaDeviceProp device{};
    cublasHandle_t blas = nullptr;
    if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || cublasCreate(&blas) != CUBLAS_STATUS_SUCCESS) {
        std::fprintf(stderr, "cuBLAS does not start on this GPU\n");
        return 1;
    }
    std::printf(
        "%s; float16, %d heads of %d, %d tokens in all. Milliseconds, and MiB of memory besides inputs and "
        "results.\n\n",
        device.name, kHeads, kDim, kTokens);
    std::printf(
        "| length | mask | forward | with cuBLAS | times as fast | backward | with cuBLAS | times as fast | "
        "memory | with cuBLAS |\n|---|---|---|---|---|---|---|---|---|---|\n");
    const Host host = measure_host();
    std::vector<Figures> all;
    int status = 0;
    for (const int length : {512, 1024, 2048, 4096, 8192, 16384}) {
        for (const bool causal : {false, true}) {
            Figures f{};
            f.length = length;
            f.causal = causal;
            if (!measure(f, blas)) {
                std::fprintf(stderr, "length %d: the two do not agree\n", length);
                status = 1;
            }
            std::printf("| %d | %s | %.3f | %.3f | %.1f | %.3f | %.3f | %.1f | %.0f | %.0f |\n", length,
                causal ? "causal" : "none", f.forward, f.plain_forward, f.plain_forward / f.forward,
                f.backward, f.plain_backward, f.plain_backward / f.backward, f.memory, f.plain_memory);
            std::fflush(stdout);
            all.push_back(f);
        }
    }
    cublasDestroy(blas);
    std::printf(
        "\nHost time of a call: forward %.1f microseconds, backward %.1f.\n", host.forward, host.backward);
    if (!json.empty()) { write(json, device.name, host, all); }
    return status;
}

}  // namespace programs

#endif
