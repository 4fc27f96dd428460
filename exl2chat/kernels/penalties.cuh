// Repetition, presence and frequency penalties over a window of tokens, counted on the device: engine/penalties.py, whose
// float64 operations these are, in their order.

#pragma once
#include "sample.cuh"

// `score` of token `id` after the penalties, when `newest` is the position of the last token of the sequence.
__device__ __forceinline__ float penalized(float score, int id, const Row& row, int newest) {
    const int4 seen = row.seen[id];
    if (seen.z < 0) return score;
    double recency = 1, occurrences = seen.x;
    const int beyond = newest - row.reach;
    if (row.reach >= 0 && row.decay) {
        recency = fmin(fmax(__dsub_rn(1, __ddiv_rn(beyond - seen.z, row.decay)), 0.0), 1.0);
        const double fading = __dmul_rn(seen.y, __dsub_rn(1, __ddiv_rn(beyond, row.decay)));
        occurrences = __dadd_rn(__dadd_rn(occurrences, fading), __ddiv_rn((double)row.positions[id], row.decay));
    } else if (row.reach >= 0)
        recency = seen.z > beyond;
    double value = score;
    if (row.repetition != 1) {
        const double strength = __dadd_rn(1, __dmul_rn(__dsub_rn(row.repetition, 1), recency));
        value = value > 0 ? __ddiv_rn(value, strength) : __dmul_rn(value, strength);
    }
    value = __dsub_rn(value, __dmul_rn(row.presence, recency));
    return __double2float_rn(__dsub_rn(value, __dmul_rn(row.frequency, occurrences)));
}

// One more of `token` in the window of the penalties: PenaltyWindow.push of engine/penalties.py.
__device__ __forceinline__ void count_token(const Row& row, int token, int newest) {
    const int leaving = newest - row.reach, gone = leaving - row.decay;
    row.history[newest] = token;
    row.seen[token].x++;
    row.seen[token].z = newest;
    if (row.reach < 0) return;
    if (leaving >= 0) {
        const int old = row.history[leaving];
        row.seen[old].x--;
        if (row.decay) row.seen[old].y++, row.positions[old] += leaving;
    }
    if (row.decay && gone >= 0) {
        const int old = row.history[gone];
        row.seen[old].y--;
        row.positions[old] -= gone;
    }
}
