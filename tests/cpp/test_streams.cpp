// Threads, streams and graphs: real GPUs alone have them.

#include <atomic>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

class Streams : public OnRealGpu {};
class Graphs : public OnRealGpu {};

struct Stream {
    Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&at, cudaStreamNonBlocking), cudaSuccess); }
    ~Stream() { EXPECT_EQ(cudaStreamDestroy(at), cudaSuccess); }
    void wait() const { EXPECT_EQ(cudaStreamSynchronize(at), cudaSuccess); }
    cudaStream_t at = nullptr;
};

// With the mode on, backward has one order too.
Shape shape_of(int which) {
    Shape shape;
    shape.b = 1 + which % 3;
    shape.h = 2 + 2 * (which % 2);
    shape.h_k = 2;
    shape.len_q = 64 + 37 * which;
    shape.len_k = 200 + 61 * which;
    shape.causal = which % 2 == 0;
    shape.split_size = 128;
    return shape;
}

TEST_F(Streams, EightThreadsOnEightStreamsHaveTheBitsOfEachAlone) {
    constexpr int kThreads = 8, kRounds = 20;
    NEEDS_KERNELS(shape_of(0), true);
    std::vector<std::unique_ptr<Inputs>> inputs;
    std::vector<std::unique_ptr<Calls>> calls;
    std::vector<Results> alone;
    for (int i = 0; i < kThreads; ++i) {
        inputs.push_back(std::make_unique<Inputs>(Inputs::draw(shape_of(i), i + 1)));
        calls.push_back(std::make_unique<Calls>(*inputs.back()));
        SUCCEEDS(calls[i]->run_forward());
        SUCCEEDS(calls[i]->run_backward());
        alone.push_back(calls[i]->results());
        calls[i]->poison();
    }
    SUCCEEDS(cudaDeviceSynchronize());
    std::atomic<int> ready{0}, failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
            const Stream stream;
            ++ready;
            while (ready < kThreads) { std::this_thread::yield(); }
            for (int round = 0; round < kRounds; ++round) {
                failed += calls[i]->run_forward(stream.at) != cudaSuccess;
                failed += calls[i]->run_backward(stream.at) != cudaSuccess;
                // A mistake of this thread is not another's.
                failed += flash_attention_v2_run_forward(nullptr, stream.at) != cudaErrorInvalidValue;
                failed += std::string(flash_attention_v2_last_error()).empty();
            }
            stream.wait();
        });
    }
    for (std::thread &thread : threads) { thread.join(); }
    EXPECT_EQ(failed, 0);
    for (int i = 0; i < kThreads; ++i) { EXPECT_TRUE(calls[i]->results() == alone[i]) << shape_of(i).told(); }
}

TEST_F(Streams, CleanupBesideCallsIsSafe) {
    NEEDS_KERNELS(shape_of(1), true);
    const Inputs inputs = Inputs::draw(shape_of(1));
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    const Results alone = calls.results();
    std::atomic<bool> done{false};
    std::thread cleaner([&] {
        while (!done) { EXPECT_EQ(flash_attention_v2_cleanup(), cudaSuccess); }
    });
    for (int round = 0; round < 100; ++round) {
        EXPECT_EQ(calls.run_forward(), cudaSuccess) << flash_attention_v2_last_error();
        EXPECT_EQ(calls.run_backward(), cudaSuccess) << flash_attention_v2_last_error();
    }
    done = true;
    cleaner.join();
    EXPECT_TRUE(calls.results() == alone);
}

struct Graph {
    cudaGraphExec_t exec = nullptr;
    ~Graph() {
        if (exec != nullptr) { EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess); }
    }
    void capture(const Calls &calls, const Stream &stream) {
        cudaGraph_t graph = nullptr;
        SUCCEEDS(cudaStreamBeginCapture(stream.at, cudaStreamCaptureModeThreadLocal));
        const cudaError_t forward = calls.run_forward(stream.at), backward = calls.run_backward(stream.at);
        SUCCEEDS(cudaStreamEndCapture(stream.at, &graph));
        SUCCEEDS(forward);
        SUCCEEDS(backward);
        SUCCEEDS(cudaGraphInstantiate(&exec, graph, 0));
        SUCCEEDS(cudaGraphDestroy(graph));
    }
};

TEST_F(Graphs, ReplayHasTheBitsOfCalls) {
    NEEDS_KERNELS(shape_of(0), true);
    const Inputs inputs = Inputs::draw(shape_of(0));
    const Calls calls(inputs);
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    const Results alone = calls.results();
    const Stream stream;
    Graph graph;
    graph.capture(calls, stream);
    for (int round = 0; round < 3; ++round) {
        calls.poison();
        SUCCEEDS(cudaDeviceSynchronize());
        SUCCEEDS(cudaGraphLaunch(graph.exec, stream.at));
        stream.wait();
        EXPECT_TRUE(calls.results() == alone);
    }
}

TEST_F(Graphs, TheFirstCallOfAllMayBeCaptured) {
    NEEDS_KERNELS(shape_of(0), true);
    const Inputs inputs = Inputs::draw(shape_of(0));
    const Calls calls(inputs);
    SUCCEEDS(flash_attention_v2_cleanup());
    const Stream stream;
    Graph graph;
    graph.capture(calls, stream);
    SUCCEEDS(cudaGraphLaunch(graph.exec, stream.at));
    stream.wait();
    const Results replayed = calls.results();
    calls.poison();
    SUCCEEDS(calls.run_forward());
    SUCCEEDS(calls.run_backward());
    EXPECT_TRUE(calls.results() == replayed);
}

TEST_F(Graphs, InterleavedAndBesideCallsKeepTheirBits) {
    NEEDS_KERNELS(shape_of(0), true);
    const Inputs one = Inputs::draw(shape_of(0), 1), two = Inputs::draw(shape_of(3), 2),
                 three = Inputs::draw(shape_of(4), 3);
    const Calls first(one), second(two), loose(three);
    std::vector<Results> alone;
    for (const Calls *calls : {&first, &second, &loose}) {
        SUCCEEDS(calls->run_forward());
        SUCCEEDS(calls->run_backward());
        alone.push_back(calls->results());
        calls->poison();
    }
    const Stream a, b, c;
    Graph graph, other;
    graph.capture(first, a);
    other.capture(second, b);
    SUCCEEDS(cudaDeviceSynchronize());
    for (int round = 0; round < 20; ++round) {
        SUCCEEDS(cudaGraphLaunch(graph.exec, a.at));
        SUCCEEDS(cudaGraphLaunch(other.exec, b.at));
        SUCCEEDS(loose.run_forward(c.at));
        SUCCEEDS(loose.run_backward(c.at));
        if (round % 2) { SUCCEEDS(cudaGraphLaunch(other.exec, a.at)); }
        if (round % 2) { a.wait(); }
    }
    SUCCEEDS(cudaDeviceSynchronize());
    EXPECT_TRUE(first.results() == alone[0]);
    EXPECT_TRUE(second.results() == alone[1]);
    EXPECT_TRUE(loose.results() == alone[2]);
}

}  // namespace
