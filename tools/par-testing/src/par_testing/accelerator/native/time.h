// When calls begin and end in virtual time, whatever the order in which threads of Python happen to issue them.
//
// A call that has been issued has no times yet. It is a node of a graph: it waits for the end of other nodes, such as
// the call before it on its stream, and then for its engine. Engines work through the graph only when somebody asks for
// a time. They take nodes in the order in which these get ready, so two threads that share an engine always get the
// same turns, if both have issued their calls by then.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace strict_device {
struct Engine;
struct Waited;
struct Node {
  Engine* engine = nullptr;             // none: it ends when it is ready
  double seconds = 0;                   // for which it keeps the engine busy
  std::pair<size_t, uint64_t> turn;     // thread and number in it: who is first of two that get ready at once
  double ready = 0, begin = 0, end = 0;
  size_t missing = 0;                   // how many of those that it waits for have no end yet
  bool done = false;
  std::vector<std::pair<Node*, double>> next = {};  // who waits for its end, and how long after it
  std::shared_ptr<Waited> waited = {};
};
using NodePtr = std::shared_ptr<Node>;

// A time: so long after a node's end. It stays that sum when the end is known. Else the last bits of later sums would
// depend on when somebody asked.
struct When {
  NodePtr node = {};
  double plus = 0;
  double value() const { return (node ? node->end : 0) + plus; }
};
struct Waited {  // how long streams waited because of a place in the program
  std::map<std::string, double>& by_place;
  std::string place;
  NodePtr since;
};

struct ByTurn {
  bool operator()(const Node* a, const Node* b) const {
    return std::tie(a->ready, a->turn) < std::tie(b->ready, b->turn);
  }
};
struct Engine {
  double busy = 0;                      // until when
  std::set<Node*, ByTurn> waiting = {};
  double next() const { return std::max(busy, (*waiting.begin())->ready); }
};
static std::map<std::pair<int, std::string>, Engine> engines_;  // by device and kind: "compute", "into", "out"
static std::deque<NodePtr> undone_;     // keeps nodes until they have an end, also those that nobody else holds

static void finish(Node& first, double begin) {
  std::vector<std::pair<Node*, double>> known{{&first, begin}};
  while (!known.empty()) {
    auto [node, at] = known.back();
    known.pop_back();
    node->begin = at;
    node->end = at + node->seconds;
    node->done = true;
    if (auto w = std::exchange(node->waited, nullptr); w && node->end > w->since->end)
      w->by_place[w->place] += node->end - w->since->end;
    for (auto [other, plus] : node->next) {
      other->ready = std::max(other->ready, node->end + plus);
      if (--other->missing) continue;
      if (other->engine) other->engine->waiting.insert(other);
      else known.emplace_back(other, other->ready);
    }
    node->next.clear();
  }
}
static NodePtr add_node(NodePtr node, std::initializer_list<When> after) {
  for (auto& when : after) {
    if (when.node && !when.node->done) {
      when.node->next.emplace_back(node.get(), when.plus);
      node->missing++;
    } else {
      node->ready = std::max(node->ready, when.value());
    }
  }
  undone_.push_back(node);
  if (!node->missing) {
    if (node->engine) node->engine->waiting.insert(node.get());
    else finish(*node, node->ready);
  }
  return node;
}
static When latest(std::initializer_list<When> times) { return {add_node(std::make_shared<Node>(), times)}; }

// The engine whose next node begins first serves that node. Nodes that get ready by it begin no earlier, so none of
// them should have been served before.
static void serve() {
  Engine* first = nullptr;
  for (auto& [_, engine] : engines_)
    if (!engine.waiting.empty() && (!first || engine.next() < first->next())) first = &engine;
  auto& node = **first->waiting.begin();
  first->waiting.erase(first->waiting.begin());
  auto begin = std::max(node.ready, first->busy);
  first->busy = begin + node.seconds;
  finish(node, begin);
}
static double settled(const When& when) {
  while (when.node && !when.node->done) serve();
  while (!undone_.empty() && undone_.front()->done) undone_.pop_front();
  return when.value();
}
}  // namespace strict_device
