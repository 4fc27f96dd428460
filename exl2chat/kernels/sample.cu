// From the logits of a step to its tokens, and on to the state from which the next step begins:
// penalties, temperature, top-k, top-p, min-p in this order, then the draw by Gumbel-max, as engine/sampler.py has them.
//
//     score    scores = penalised logits / temperature; the best of them
//     weigh    how many scores, and how much probability, lie 0/24 to 1/24, 1/24 to 2/24, ... below the best
//     choose   the bins that top-k and top-p keep whole, and the one or few that they cut; the token drawn
//
// Probabilities exp(score - best) are integers, 2^42 for the best, so that their sums do not depend on their order. A
// token more than 1024/24 = 42.7 below the best is left out: the noise of two tokens differs by at most 40.4.
//
// layout    Problem and Row, below; logits [rows, stride] float32, of which the first `count` are tokens
// launch    grid (ceil(count / 1024), rows), 512 threads, for all three
// limits    count at most 2^20. NaN or a best that is infinite gives the token -1 (and 0 as the next step's)
// numerics  penalties float64 and the quotient float32, as NumPy rounds them; noise the same bits, its logarithms float64;
//           float32 exp within 2 ulp, as NumPy's: a token whose probability top-p ends in may differ by 1e-7 of the sum.
//           Bit-equal at every call
// reference Sampler of exl2chat/engine/sampler.py; tests/gpu/test_sample.py

#include "cut.cuh"
#include "gumbel.cuh"
#include "penalties.cuh"

__device__ __forceinline__ int token_of(int i) { return (blockIdx.x * EACH + i) * THREADS + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(THREADS) score(const Problem p) {
    release_successor();
    await_predecessor();
    const Row row = p.rows[blockIdx.y];
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
    best = reduce(best, [](u64 a, u64 b) { return max(a, b); });
    if (threadIdx.x == 0) atomicMax(&p.shared[blockIdx.y].best, best);
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
    await_predecessor();
    const Row row = p.rows[blockIdx.y];
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

// The draw of this block from the bins that are kept whole; the tokens of the others go to `list`.
__device__ __forceinline__ Pick draw_kept(const Scores& scores, const Cut& cut, Draw draw, float least, u64* list,
                                          u32* listed) {
    bool kept[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int bin = bin_of(draw.best - scores.at[i]);
        if (bin >= cut.first && bin <= cut.last) list[atomicAdd(listed, 1)] = key_of(scores.at[i], token_of(i));
        kept[i] = bin < min(cut.first, BINS) && scores.at[i] >= least;
        if (kept[i]) draw.rough(scores.at[i], token_of(i));
    }
    draw.share();
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (kept[i]) draw.exact(scores.at[i], token_of(i));
    return reduce(draw.pick, likelier);
}

// The draw of the row: from the tokens listed, as far as they are kept, and from what the blocks have drawn.
__device__ __forceinline__ int draw_last(const Row& row, const Cut& cut, Draw draw, float least, const u64* list,
                                         int length, const Pick* picks) {
    __shared__ u64 near[NEAR];
#pragma unroll 1
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) draw.pick = likelier(picks[i], draw.pick);
    if (length && length <= NEAR) {
#pragma unroll 1
        for (int i = threadIdx.x; i < length; i += THREADS) near[i] = list[i];
        list = near;
        __syncthreads();
    }
    if (length) {
        const u64 last = max(least_key(row, cut, list, length, draw.best), key_of(least, (1 << ID_BITS) - 1));
#pragma unroll 1
        for (int i = threadIdx.x; i < length; i += THREADS)
            if (list[i] >= last) draw.rough(score_of(list[i]), id_of(list[i]));
        draw.share();
#pragma unroll 1
        for (int i = threadIdx.x; i < length; i += THREADS)
            if (list[i] >= last) draw.exact(score_of(list[i]), id_of(list[i]));
    }
    return reduce(draw.pick, likelier).id;
}

// By one block: the token becomes part of the sequence, and what the blocks share is as it was before.
__device__ __forceinline__ void finish(const Row& row, int token, int newest, Shared& shared) {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.counts[bin] = shared.weights[bin] = 0;
    if (threadIdx.x) return;
    shared.best = shared.listed = shared.arrived = 0;
    *row.position = newest;
    *row.token = max(token, 0);
    row.results[newest & row.mask] = token;
    if (row.seen && token >= 0) count_token(row, token, newest);
}

extern "C" __global__ void __launch_bounds__(THREADS) choose(const Problem p) {
    __shared__ bool last;
    release_successor();
    await_predecessor();
    const Row row = p.rows[blockIdx.y];
    Shared& shared = p.shared[blockIdx.y];
    const u64 first = shared.best;
    const Scores scores(p);
    const Bins bins(shared);
    const int newest = *row.position + 1;
    if (row.greedy || !is_number(first)) {
        if (blockIdx.x == 0) finish(row, is_number(first) ? id_of(first) : -1, newest, shared);
        return;
    }
    const float best = score_of(first), least = __fadd_rn(best, row.least);
    const Cut cut = find_cut(row, bins);
    const Draw draw(splitmix(row.seed, newest), best);
    u64* list = p.list + (size_t)blockIdx.y * p.count;
    Pick* picks = p.picks + blockIdx.y * gridDim.x;
    const Pick pick = draw_kept(scores, cut, draw, least, list, &shared.listed);
    __threadfence();  // the list
    __syncthreads();
    if (threadIdx.x == 0) {
        picks[blockIdx.x] = pick;
        __threadfence();
        last = atomicAdd(&shared.arrived, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    finish(row, draw_last(row, cut, draw, least, list, shared.listed, picks), newest, shared);
}
