// HopMode is what a Hop worker waits for: the options, which go together, and how far apart two workers can get (Luo et
// al., "Hop: Heterogeneity-Aware Decentralized Training", ASPLOS 2019, sections 3 to 5).
//
//   standard           models of the same iteration from all in-neighbours
//   notify-ack         the older protocol, a baseline: tag k + 1 is sent to a neighbour after its ACK of tag k only
//   tokens             max_iteration_gap >= 1: a worker is at most that many iterations ahead of an out-neighbour
//   backup workers     all in-neighbours but backup_workers of them; who is late is left out
//   bounded staleness  from each in-neighbour its newest model, up to `staleness` iterations old
//   skipping           a worker whose out-neighbours are all ahead jumps up to max_jump iterations, and computes none
//                      of those between
//
// Legal combinations: standard, backup or staleness; tokens with each of them, always with backup; skipping with tokens
// and backup or staleness; notify-ack alone. Pure functions; no threads.
#pragma once

#include "core/hop/communication_graph.h"

namespace torchext::core {

struct HopMode {
  bool notify_ack = false;
  int max_iteration_gap = 0;  // iterations; 0: no token queues
  int backup_workers = 0;     // in-neighbours that need not be waited for; 0: wait for all
  int staleness = 0;          // iterations that a model may be old; 0: none
  int max_jump = 0;           // iterations of one jump, 2 or more; 0: no skipping
  int jump_trigger = 1;       // skipping: a lag of more iterations than this makes a worker jump; 1 or more

  bool hasTokens() const { return max_iteration_gap > 0; }
  bool skips() const { return max_jump > 0; }
};

// std::invalid_argument with the name, the value, and what to set instead. The first checks what needs no graph.
void validateHopMode(const HopMode& mode);
void validateHopMode(const HopMode& mode, const CommunicationGraph& graph);

// Largest Iter(i) - Iter(j) for one pair, from the two path lengths (section 4, theorems 1 and 2):
//   standard           len(j->i)             with tokens  min(len(j->i), max_ig len(i->j))
//   notify-ack         min(len(j->i), 2 len(i->j))
//   backup + tokens    max_ig len(i->j)
//   staleness s        (s + 1) len(j->i)     with tokens  min((s + 1) len(j->i), max_ig len(i->j))
// Iter is the iteration that a worker computes. Skipping changes none of them: while a worker that jumps refreshes its
// model it counts as ahead for those it gave tokens to, and computes nothing.
int iterationGapBound(const HopMode& mode, int length_j_to_i, int length_i_to_j);

// The same for an in-neighbour, as far as its messages tell where it is: of one that is no out-neighbour, and so gives
// no tokens back, only models do, which with staleness may be as late as that.
int toldGapBound(const HopMode& mode, bool gives_tokens, int length_to_peer);

// Iterations that an in-neighbour's model can be ahead of its receiver, over all edges: what an UpdateQueue must hold
// besides the current one. max_iteration_gap, or less where the paths back are short; finite without tokens, too.
// O(size * edges).
int largestLead(const HopMode& mode, const CommunicationGraph& graph);

// Skipping. lag = (the smallest of the token queues that a worker takes from) - max_iteration_gap = how far the
// out-neighbour that is furthest behind is ahead of the worker. The jump to make instead of the next step: from k to
// k + jump. 1: none.
int plannedJump(const HopMode& mode, int lag);

}  // namespace torchext::core
