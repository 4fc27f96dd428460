// From the logits of a step to its tokens, and on to the state from which the next step begins:
// penalties, temperature, top-k, top-p, min-p in this order, then the draw by Gumbel-max, as engine/sampler.py has them.
//
//     score    scores = penalised logits / temperature; the best of them
//     weigh    how many scores, and how much probability, lie 0/24 to 1/24, 1/24 to 2/24, ... below the best
//     sift     which of these bins top-k and top-p keep whole, and which they cut; a draw from the former
//     draw     what is kept of the tokens in a cut bin, and the draw from everything that is
//
// Probabilities exp(score - best) are integers, 2^42 for the best, so that their sums do not depend on their order. A
// token more than 1024/24 = 42.7 below the best is left out: the noise of two tokens differs by at most 40.4.
//
// layout    Problem and Row of sample.cuh; logits [rows, stride] float32, of which the first `count` are tokens
// launch    grid (blocks, rows) with blocks = ceil(count / 1024), (1, rows) for draw; 512 threads
// limits    count at most 2^20. NaN or a best that is infinite gives the token -1 (and 0 as the next step's)
// numerics  penalties float64 and the quotient float32, as NumPy rounds them; noise the same bits, its logarithms float64;
//           float32 exp within 2 ulp, as NumPy's: a token whose probability top-p ends in may differ by 1e-7 of the sum.
//           Bit-equal at every call
// measured  NVIDIA H200, 2026-11-21, 128,256 logits, when sift and draw were one launch: 17.7 us with top-k and top-p, 10.2
//           with neither, 4.3 greedy, in a chain of graph nodes (benchmarks/NOTES.md)
// reference Sampler of exl2chat/engine/sampler.py; tests/gpu/test_sample.py

#include "cut.cuh"
#include "gumbel.cuh"
#include "penalties.cuh"

__device__ __forceinline__ int token_of(int i) { return (blockIdx.x * EACH + i) * THREADS + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(THREADS) score(const Problem p) {
    release_successor();
    const Row row = p.rows[blockIdx.y];
    await_predecessor();
    float scores[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (token_of(i) < p.count) scores[i] = p.logits[(size_t)blockIdx.y * p.stride + token_of(i)];
    const int newest = row.seen ? *row.position : 0;
    const float temperature = row.greedy ? 1 : row.temperature;
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (token_of(i) >= p.count) break;
        if (row.seen) scores[i] = penalized(scores[i], token_of(i), row, newest);
        scores[i] = __fadd_rn(__fdiv_rn(scores[i], temperature), 0);  // not -0, which would have another key than 0
        p.scores[(size_t)blockIdx.y * p.count + token_of(i)] = scores[i];
        best = max(best, key_of(scores[i], token_of(i)));
    }
    const u32 order = largest((u32)(best >> ID_BITS)), rest = largest(order == best >> ID_BITS ? (u32)best & LAST_ID : 0);
    if (threadIdx.x == 0) atomicMax(&p.shared[blockIdx.y].best, (u64)order << ID_BITS | rest);
}

// The scores that a thread looks at; NaN beyond the last.
struct Scores {
    float at[EACH];

    __device__ __forceinline__ explicit Scores(const Problem& p) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            at[i] = token_of(i) < p.count ? p.scores[(size_t)blockIdx.y * p.count + token_of(i)] : __uint_as_float(~0u);
    }
};

__device__ __forceinline__ bool is_number(u64 best) { return isfinite(score_of(best)); }

extern "C" __global__ void __launch_bounds__(THREADS) weigh(const Problem p) {
    __shared__ u32 counts[BINS], low[BINS], high[BINS];
    release_successor();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = low[bin] = high[bin] = 0;
    const Row row = p.rows[blockIdx.y];
    await_predecessor();
    Shared& shared = p.shared[blockIdx.y];
    const Scores scores(p);
    const u64 best = shared.best;
    if (row.greedy || (!row.top_k && row.top_p >= 1) || !is_number(best)) return;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float below = score_of(best) - scores.at[i];
        const int bin = bin_of(below);
        if (bin == BINS) continue;
        if (row.top_k) atomicAdd(counts + bin, 1);
        if (row.top_p < 1) add(low + bin, high + bin, weight_of(below));
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        const u64 weight = (u64)high[bin] << 32 | low[bin];
        if (counts[bin]) atomicAdd(shared.counts + bin, counts[bin]);
        if (weight) atomicAdd(shared.weights + bin, weight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sift(const Problem p) {
    release_successor();
    const Row row = p.rows[blockIdx.y];
    await_predecessor();
    Shared& shared = p.shared[blockIdx.y];
    const u64 best = shared.best;
    const Scores scores(p);
    const Bins bins(shared);
    Draw draw(splitmix(row.seed, *row.position + 1), score_of(best));
    if (row.greedy || !is_number(best)) return;
    const float least = __fadd_rn(draw.best, row.least);
    const Cut cut = find_cut(row, bins);
    bool kept[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const float score = scores.at[i];
        const int bin = bin_of(draw.best - score);
        if (bin >= cut.first && bin <= cut.last)
            p.list[(size_t)blockIdx.y * p.count + atomicAdd(&shared.listed, 1)] = key_of(score, token_of(i));
        kept[i] = bin < min(cut.first, BINS) && score >= least;
        if (kept[i]) draw.offer(draw.rough(score, token_of(i)));
    }
    draw.close();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (kept[i]) draw.take(scores.at[i], token_of(i));
    const Pick pick = draw.settle();
    if (threadIdx.x) return;
    p.picks[blockIdx.y * gridDim.x + blockIdx.x] = pick;
    if (blockIdx.x == 0) shared.cut = cut;
}

// The token drawn from those listed, as far as they are kept, and from what the blocks of `sift` picked.
__device__ __forceinline__ int draw_last(const Row& row, Draw draw, const Cut& cut, List list, const Pick* picks,
                                         int blocks) {
    __shared__ u64 near[NEAR];
    if (list.length <= NEAR) {
        for (int i = threadIdx.x; i < list.length; i += THREADS) near[i] = list.keys[i];
        list.keys = near;
        __syncthreads();
    }
    u64 last = key_of(__fadd_rn(draw.best, row.least), LAST_ID);
    if (list.length) last = max(last, least_key(row, cut, list));
#pragma unroll 1
    for (int i = threadIdx.x; i < list.length; i += THREADS)
        if (list.keys[i] >= last) draw.offer(draw.rough(score_of(list.keys[i]), id_of(list.keys[i])));
#pragma unroll 1
    for (int i = threadIdx.x; i < blocks; i += THREADS)
        if (picks[i].value) draw.offer(draw.rough(picks[i]));
    draw.close();
#pragma unroll 1
    for (int i = threadIdx.x; i < list.length; i += THREADS)
        if (list.keys[i] >= last) draw.take(score_of(list.keys[i]), id_of(list.keys[i]));
#pragma unroll 1
    for (int i = threadIdx.x; i < blocks; i += THREADS)
        if (picks[i].value && draw.rough(picks[i]) >= draw.bound) draw.take(picks[i]);
    return draw.settle().id;
}

// The token becomes part of the sequence, and what the blocks share is as it was before.
__device__ __forceinline__ void finish(const Row& row, int token, int newest, Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.counts[bin] = shared.weights[bin] = 0;
    if (threadIdx.x) return;
    shared.best = shared.listed = 0;
    *row.position = newest;
    *row.token = max(token, 0);
    row.results[newest & row.mask] = token;
    if (row.seen && token >= 0) count_token(row, token, newest);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) draw(const Problem p, int blocks) {
    release_successor();
    const Row row = p.rows[blockIdx.y];
    await_predecessor();
    Shared& shared = p.shared[blockIdx.y];
    const u64 best = shared.best;
    const Cut cut = shared.cut;
    const int newest = *row.position + 1;
    int token = is_number(best) ? id_of(best) : -1;
    if (!row.greedy && token >= 0) {
        const List list(p.list + (size_t)blockIdx.y * p.count, shared.listed, cut, score_of(best));
        const Draw draw(splitmix(row.seed, newest), list.best);
        token = draw_last(row, draw, cut, list, p.picks + (size_t)blockIdx.y * blocks, blocks);
    }
    finish(row, token, newest, shared);
}
