// RowExchange brings together the rows of all ranks of which gradients of matrices are made (sufficient factors).
//
// The gradient of a matrix is a multiple of sum g a^T over the rows of all ranks' batches. Here a is a row of what the
// matrix is multiplied with, and g the gradient of what comes of it. A few rows are much less than the gradient itself.
//
// The path of the data. keep() copies a call's rows into this rank's place of a message; several small matrices share
// one. A message whose matrices have had as many rows as is usual here leaves at once, inside the backward pass. That
// is before most gradients do. leave() sends the rest. Whoever uses the rows waits for a message that has left, and
// reads those of all ranks in it; next() ends the step. Where links have one call for all ranks' parts, all goes in
// leave(). One rank alone sends nothing.
//
// Who decides what. Which matrices, and how many rows each rank has a place for, is the same on all ranks. Every rank
// sends every message once a step, whatever has happened in it. That a matrix had more rows than places, or none, or
// that the rank has given the step up, stands in the message. Rows that come too late to be in it belong to the
// gradient all the same: who uses a message compares.
//
// Threads: the owner's calls under a lock of its own. Another thread may have one message that has left, until next().
// No call blocks but Message::wait(), next() and, where parts go in one call, leave().
// Errors: c10::DistBackendError from wait() and next() where a rank is in another step; those of the links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace torchext {

// How rows reach the other ranks: by messages, or by a call for the parts of all ranks.
struct RowLinks {
  using Work = c10::intrusive_ptr<c10d::Work>;
  int rank = 0;
  int ranks = 1;
  std::function<Work(const at::Tensor& rows, int to, int tag)> send;
  std::function<Work(const at::Tensor& rows, int from, int tag)> receive;
  // Null: messages. Else every rank's part to every other, in a collective call that blocks.
  std::function<void(const std::vector<at::Tensor>& parts)> gather;
};

class RowExchange {
 public:
  using Work = RowLinks::Work;
  struct Matrix {
    int number = -1;  // the owner's
    std::int64_t inputs = 0;
    std::int64_t outputs = 0;
    std::int64_t places = 0;  // for rows of every rank
  };
  // [rows, inputs] and [rows, outputs]: those of rank 0 first. Undefined: not all of them are known, or there are none.
  struct Rows {
    at::Tensor inputs;
    at::Tensor gradients;
  };
  class Message {
   public:
    // Of the matrices whose rows it has.
    const std::vector<int>& matrices() const { return numbers_; }
    // Until those of all ranks are here. Twice is harmless.
    void wait();
    Rows rows(int matrix) const;
    // Whether a rank had more rows than places. After wait().
    bool tooMany(int matrix) const;
    // A rank that has given the step up, if one has. After wait().
    std::optional<int> abandonedBy() const;

   private:
    friend class RowExchange;
    struct Place {
      std::int64_t count = 0;    // where in a rank's part: the number of rows,
      std::int64_t inputs = 0;   // a [places, inputs],
      std::int64_t outputs = 0;  // g [places, outputs]
      std::int64_t kept = 0;     // rows in this step
      std::int64_t usual = 0;    // in any
      Matrix matrix;
    };
    std::size_t placeOf(int matrix) const;  // in places_
    at::Tensor rowsOf(int rank, const Place& place, bool inputs) const;
    double number(int rank, std::int64_t place) const;
    void checkSent(int rank) const;
    void restart();

    std::vector<int> numbers_;
    std::vector<Place> places_;
    at::Tensor all_;  // [ranks, elements], each: the step, counts, rows
    const char* what_ = nullptr;
    std::int64_t step_ = 0;
    std::size_t missing_ = 0;  // matrices that have not had their usual rows
    bool left_ = false;
    bool come_ = false;
    std::vector<Work> coming_;
    std::vector<Work> going_;
  };
  // Called for each message when it has left.
  using Left = std::function<void(const std::shared_ptr<Message>&)>;

  // matrices: in the order in which the backward pass comes to them. links: none for one rank. tag: of the first
  // message; there are no more than matrices. what: who asks, in errors.
  RowExchange(std::vector<Matrix> matrices, const at::TensorOptions& options, std::optional<RowLinks> links, int tag,
              const char* what, Left left);

  const std::vector<Matrix>& matrices() const { return matrices_; }
  const at::TensorOptions& options() const { return options_; }
  bool has(int matrix) const { return find(matrix) != nullptr; }
  // Whether rows come while the owner does something else.
  bool travels() const { return links_ && !links_->gather; }
  // How many rows this rank has of a matrix in a step, as a rule. Before a step begins.
  void expect(int matrix, std::int64_t rows);
  void keep(int matrix, const at::Tensor& input, const at::Tensor& gradient);
  // Drops what was kept and has not left.
  void forget();
  void forget(int matrix);
  // Says to all ranks that this one has more rows of a matrix than can be sent. Before its message leaves.
  void overflow(int matrix);
  // Of the message in which a matrix is: whether it has left, and all matrices in it.
  bool left(int matrix) const { return find(matrix)->left_; }
  const std::vector<int>& together(int matrix) const { return find(matrix)->numbers_; }
  void leave();
  // The same of the message in which a matrix is.
  void leave(int matrix);
  // As leave(), of a rank that has given the step up.
  void abandon();
  // Messages of other ranks are awaited, from the first row of a step until next().
  bool underWay() const { return receiving_; }
  void next();
  std::size_t bytes() const;

 private:
  Message* find(int matrix) const;
  void receive();
  void send(std::size_t number, bool abandoned = false);
  void sendRest(bool abandoned);

  std::vector<Matrix> matrices_;
  at::TensorOptions options_;
  std::vector<std::shared_ptr<Message>> messages_;
  std::optional<RowLinks> links_;
  int tag_;
  const char* what_;
  Left when_left_;
  int rank_ = 0;
  int ranks_ = 1;
  std::int64_t step_ = 0;  // of this object
  bool receiving_ = false;
};

}  // namespace torchext
