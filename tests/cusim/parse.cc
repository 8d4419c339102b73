#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "tests/cusim/ptx.h"
#include "tests/cusim/tokens.h"

namespace cusim {
namespace {

constexpr std::pair<std::string_view, Special> kSpecials[] = {
    {"%tid.x", Special::kTidX},         {"%tid.y", Special::kTidY},
    {"%tid.z", Special::kTidZ},         {"%ntid.x", Special::kNtidX},
    {"%ntid.y", Special::kNtidY},       {"%ntid.z", Special::kNtidZ},
    {"%ctaid.x", Special::kCtaX},       {"%ctaid.y", Special::kCtaY},
    {"%ctaid.z", Special::kCtaZ},       {"%nctaid.x", Special::kNctaX},
    {"%nctaid.y", Special::kNctaY},     {"%nctaid.z", Special::kNctaZ},
    {"%laneid", Special::kLane},        {"%warpid", Special::kWarp},
    {"%nwarpid", Special::kNwarp},      {"%smid", Special::kSmid},
    {"%nsmid", Special::kNsmid},        {"%lanemask_eq", Special::kLaneEq},
    {"%lanemask_lt", Special::kLaneLt}, {"%lanemask_le", Special::kLaneLe},
    {"%lanemask_gt", Special::kLaneGt}, {"%lanemask_ge", Special::kLaneGe},
    {"WARP_SZ", Special::kWarpSize},    {"%dynamic_smem_size", Special::kDynamicShared},
    {"%envreg1", Special::kGridHigh},   {"%envreg2", Special::kGridLow},
};

int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Storage {  // ".align 4 .b8 x[128]"
  std::string name;
  size_t element = 1, count = 1, align = 0;
  bool unsized = false;
  size_t bytes() const { return element * count; }
};

}  // namespace

// Notes where kernels and functions are, which may be thousands; one is read when it is asked for.
class Module::Parser {
 public:
  Parser(std::string_view text, const Place& place) : t_({text}, Tokens::kWhole) {
    auto files = std::make_shared<std::vector<std::string>>();
    files_ = files;
    while (!t_.AtEnd()) TopLevel(files.get(), place);
  }

  const std::map<std::string, std::pair<uint64_t, size_t>>& variables() const { return variables_; }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& [name, part] : kernels_) names.push_back(name);
    return names;
  }
  const Kernel* Read(const std::string& name) {
    const auto part = kernels_.find(name);
    if (part == kernels_.end()) return nullptr;
    const auto [it, fresh] = read_.try_emplace(name);
    if (fresh) {
      try {
        ReadKernel(part->second, &it->second);
      } catch (...) {
        read_.erase(it);
        throw;
      }
    }
    return &it->second;
  }

 private:
  using Symbols = std::map<std::string, int64_t, std::less<>>;

  void TopLevel(std::vector<std::string>* files, const Place& place) {
    const std::string_view word = t_.Peek();
    if (word == ".version" || word == ".target" || word == ".address_size") return t_.SkipLine();
    if (word == ".file") {
      const auto line = t_.TakeLine();
      const size_t number = std::strtoul(std::string(line.at(1)).c_str(), nullptr, 10);
      if (files->size() <= number) files->resize(number + 1);
      (*files)[number] = std::string(line.at(2).substr(1, line.at(2).size() - 2));
      return;
    }
    if (word == ".section") return t_.SkipBlock();
    bool external = false;
    while (t_.Peek() == ".visible" || t_.Peek() == ".weak" || t_.Peek() == ".extern" ||
           t_.Peek() == ".common") {
      external |= t_.Next() == ".extern";
    }
    if (t_.Take(".entry")) {
      const size_t begin = t_.position();
      const std::string name(t_.Peek());
      t_.SkipBlock();
      kernels_[name] = t_.From(begin);
      return;
    }
    if (t_.Take(".func")) return NoteFunction();
    if (t_.Peek() == ".shared" || t_.Peek() == ".global" || t_.Peek() == ".const") {
      return ModuleStorage(external, place);
    }
    if (t_.Peek() == ".pragma" || t_.Peek() == ";") return t_.SkipPast(";");
    t_.Fail("a directive that is not known");
  }

  void ModuleStorage(bool external, const Place& place) {
    const std::string space(t_.Next());
    Storage s = ReadStorage();
    if (space == ".shared") {
      s.unsized |= external && s.count == 0;
      module_shared_.push_back(s);
      t_.Expect(";");
      return;
    }
    Variable v{s.name, s.bytes(), s.align, {}};
    if (t_.Take("=")) Initial(s, &v);
    v.bytes = std::max(v.bytes, v.init.size());
    t_.Expect(";");
    variables_[v.name] = {place(v), v.bytes};
  }

  void Initial(const Storage& s, Variable* v) {
    v->init.assign(s.bytes(), 0);
    size_t at = 0;
    const auto put = [&](uint64_t value) {
      if (at + s.element > v->init.size()) v->init.resize(at + s.element);
      std::memcpy(&v->init[at], &value, s.element);
      at += s.element;
    };
    const auto one = [&] {
      uint64_t value = 0;
      if (t_.Take("generic")) {
        t_.Expect("(");
        value = variables_.at(std::string(t_.Next())).first;
        t_.Expect(")");
      } else if (const auto it = variables_.find(std::string(t_.Peek())); it != variables_.end()) {
        value = it->second.first;
        t_.Next();
      } else {
        value = ReadNumber();
      }
      put(value);
    };
    if (!t_.Take("{")) return one();
    while (!t_.Take("}")) {
      one();
      t_.Take(",");
    }
  }

  // After the space, up to what follows the name and its extent.
  Storage ReadStorage() {
    Storage s;
    while (true) {
      const std::string word(t_.Next());
      if (word == ".align") {
        s.align = ReadNumber();
      } else if (word == ".ptr" || word == ".attribute" || word == ".const" || word == ".global" ||
                 word == ".shared" || word == ".local") {
        if (word == ".attribute") t_.SkipPast(")");
      } else if (word == ".v2" || word == ".v4") {
        s.count *= word[2] - '0';
      } else if (word[0] == '.') {
        if (TypeNamed(word.substr(1)) == Type::kNone) t_.Fail("no type: " + word);
        s.element = SizeOf(TypeNamed(word.substr(1)));
      } else {
        s.name = word;
        break;
      }
    }
    while (t_.Take("[")) {
      if (t_.Take("]")) {
        s.count = 0;
        s.unsized = true;
        continue;
      }
      s.count *= ReadNumber();
      t_.Expect("]");
    }
    if (s.align == 0) s.align = s.element;
    return s;
  }

  // One that is defined is kept, to be read into each kernel that calls it.
  void NoteFunction() {
    const size_t begin = t_.position();
    if (t_.Peek() == "(") t_.SkipPast(")");
    const std::string name(t_.Next());
    while (t_.Peek()[0] != '{' && t_.Peek() != ";") t_.Next();
    if (t_.Take(";")) return;  // declared: vprintf, or defined later
    t_.Next();
    functions_[name] = t_.From(begin);
  }

  void ReadKernel(const Tokens::Part& part, Kernel* kernel) {
    t_ = Tokens(part);
    kernel_ = kernel;
    kernel_->name = t_.Next();
    kernel_->specials.fill(-1);
    kernel_->files = files_;
    names_.clear(), addresses_.clear(), constants_.clear(), called_.clear(), calls_.clear();
    local_params_.clear(), dynamic_.clear(), signatures_.clear();
    line_ = file_ = 0;
    if (t_.Take("(")) {
      while (!t_.Take(")")) {
        t_.Expect(".param");
        const Storage s = ReadStorage();
        kernel_->param_bytes = RoundUp(kernel_->param_bytes, s.align);
        kernel_->params.push_back({s.name, kernel_->param_bytes, static_cast<int>(s.bytes())});
        addresses_[s.name] = kernel_->param_bytes;
        kernel_->param_bytes += static_cast<int>(s.bytes());
        t_.Take(",");
      }
    }
    while (t_.Peek() != "{") {  // .maxntid 256, 1, 1 and their kin
      if (t_.Next() == ".maxntid") {
        kernel_->max_threads = 1;
        do kernel_->max_threads *= static_cast<int>(ReadNumber());
        while (t_.Take(","));
      }
    }
    in_kernel_ = true;
    Body();
    for (size_t i = 0; i < called_.size(); ++i) ReadFunction(called_[i]);
    for (const auto& [at, function] : calls_) kernel_->code[at].target = entries_.at(function);
    // Shared memory of the launch follows that of the kernel, wherever its symbol was used.
    kernel_->shared_bytes = static_cast<int>(RoundUp(kernel_->shared_bytes, 16));
    for (const int slot : dynamic_) {
      for (auto& [s, value] : kernel_->constants) {
        if (s == slot) value = kernel_->shared_bytes;
      }
    }
    kernel_->undefined = kernel_->error.empty() && MayReadUndefined(*kernel_);
  }

  // A function's body, at the end of the kernel's code. Its parameters are local memory of a
  // thread, and so is what is returned: recursion is not supported.
  void ReadFunction(const std::string& name) {
    t_ = Tokens(functions_.at(name));
    Signature& signature = signatures_[name];
    names_.clear();
    entries_[name] = static_cast<int>(kernel_->code.size());
    in_kernel_ = false;
    return_slot_ = signature.return_slot;
    for (auto* list : {&signature.results, &signature.params}) {
      if (list == &signature.params) t_.Next();  // the name
      size_t i = 0;
      if (!t_.Take("(")) continue;
      while (!t_.Take(")")) {
        t_.Next();  // .param, or .reg in text that no compiler wrote
        local_params_[ReadStorage().name] = list->at(i++);
        t_.Take(",");
      }
    }
    while (t_.Peek() != "{") t_.Next();
    Body();
    local_params_.clear();
  }

  int64_t Reserve(const Storage& s, int* bytes) {
    const int64_t at = RoundUp(*bytes, s.align);
    *bytes = static_cast<int>(at + s.bytes());
    return at;
  }

  void Body() {
    labels_.clear(), branches_.clear();
    t_.Expect("{");
    Block();
    for (const auto& [at, label] : branches_) {
      const auto it = labels_.find(label);
      if (it == labels_.end()) t_.Fail("no label " + label);
      kernel_->code[at].target = it->second;
    }
    Insn last;
    last.flow = in_kernel_ ? Flow::kExit : Flow::kReturn;
    if (!in_kernel_) last.s[0] = return_slot_;
    last.text = std::make_shared<std::string>("ret");
    last.line = line_, last.file = file_;
    kernel_->code.push_back(last);
  }

  void Block() {
    const auto outer_names = names_;
    const auto outer_params = local_params_;
    while (!t_.Take("}")) {
      const std::string_view word = t_.Peek();
      if (word == "{") {
        t_.Next();
        Block();
      } else if (word == ".loc") {
        const auto line = t_.TakeLine();
        file_ = std::atoi(std::string(line.at(1)).c_str());
        line_ = std::atoi(std::string(line.at(2)).c_str());
      } else if (word == ".reg") {
        Registers();
      } else if (word == ".pragma" || word == ";" || word == ".branchtargets") {
        t_.SkipPast(";");
      } else if (word[0] == '.') {
        Declaration();
      } else if (t_.PeekAt(1) == ":") {
        labels_[std::string(t_.Next())] = static_cast<int>(kernel_->code.size());
        t_.Next();
        if (t_.Peek() == ".callprototype") t_.SkipPast(";");
      } else {
        Instruction();
      }
    }
    names_ = outer_names;
    local_params_ = outer_params;
  }

  void Registers() {  // ".reg .b32 %r<5>;" or ".reg .b16 a, b;"
    t_.Next();
    t_.Next();
    do {
      const std::string name(t_.Next());
      if (!t_.Take("<")) {
        names_[name] = kernel_->slots++;
        continue;
      }
      const int n = static_cast<int>(ReadNumber());
      for (int i = 0; i < n; ++i) names_[name + std::to_string(i)] = kernel_->slots++;
      t_.Expect(">");
    } while (t_.Take(","));
    t_.Expect(";");
  }

  void Declaration() {  // .shared, .local or, for a call, .param
    const std::string space(t_.Next());
    const Storage s = ReadStorage();
    if (space == ".shared") {
      addresses_[s.name] = Reserve(s, &kernel_->shared_bytes);
    } else if (space == ".local") {
      addresses_[s.name] = Reserve(s, &kernel_->local_bytes);
    } else if (space == ".param") {
      local_params_[s.name] = {Reserve(s, &kernel_->local_bytes), s.bytes()};
    } else {
      t_.Fail("a declaration that is not known: " + space);
    }
    t_.Expect(";");
  }

  uint64_t ReadNumber() {
    const bool minus = t_.Take("-");
    const std::string word(t_.Next());
    uint64_t value = 0;
    if (!Number(word, &value)) t_.Fail("a number was expected, not " + word);
    return minus ? 0 - value : value;
  }
  static bool Number(const std::string& word, uint64_t* value) {
    if (word.empty() || !std::isdigit(static_cast<unsigned char>(word[0]))) return false;
    const char kind = word.size() > 2 && word[0] == '0' ? word[1] : ' ';
    const bool bits = kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D';
    *value = std::strtoull(word.c_str() + (bits ? 2 : 0), nullptr, bits ? 16 : 0);
    return true;
  }

  int Constant(uint64_t value) {
    const auto [it, fresh] = constants_.try_emplace(value, kernel_->slots);
    if (fresh) kernel_->constants.emplace_back(kernel_->slots++, value);
    return it->second;
  }

  // The slot of an operand that starts here: a register, number, special register or symbol.
  int Operand() {
    if (t_.Peek() == "-") return Constant(ReadNumber());
    if (t_.Take("!")) negate_ = true;
    const std::string word(t_.Next());
    if (word == "_") return -1;
    if (const auto it = names_.find(word); it != names_.end()) return it->second;
    uint64_t value = 0;
    if (Number(word, &value)) return Constant(value);
    for (const auto& [name, id] : kSpecials) {
      if (name != word) continue;
      int& slot = kernel_->specials[static_cast<int>(id)];
      if (slot < 0) slot = kernel_->slots++;
      return slot;
    }
    if (word.starts_with("%clock") || word.starts_with("%globaltimer")) {
      clock_ = true;
      return Constant(0);
    }
    int64_t plus = 0;
    if (t_.Take("+")) plus = static_cast<int64_t>(ReadNumber());
    if (const auto it = addresses_.find(word); it != addresses_.end()) {
      return Constant(it->second + plus);
    }
    if (const auto it = variables_.find(word); it != variables_.end()) {
      return Constant(it->second.first + plus);
    }
    for (const Storage& s : module_shared_) {
      if (s.name != word) continue;
      if (!s.unsized) {  // the first use: a kernel has what it uses of the module's
        addresses_[s.name] = Reserve(s, &kernel_->shared_bytes);
        return Constant(addresses_[s.name] + plus);
      }
      dynamic_.push_back(kernel_->slots++);
      kernel_->constants.emplace_back(dynamic_.back(), 0);
      return dynamic_.back();
    }
    t_.Fail("an operand that is not known: " + word);
  }

  // "[%rd1+4]": the base into in->s[0], the rest into in->offset.
  void Address(Insn* in) {
    t_.Expect("[");
    if (const auto it = local_params_.find(std::string(t_.Peek())); it != local_params_.end()) {
      t_.Next();
      in->space = Space::kLocal;
      in->offset = it->second.first;
      in->s[0] = Constant(0);
    } else {
      in->s[0] = Operand();
    }
    while (t_.Take("+")) in->offset += static_cast<int64_t>(ReadNumber());
    t_.Expect("]");
  }

  template <size_t n>
  void Into(std::array<int, n>* slots, size_t* count) {
    if (*count >= n) t_.Fail("too many operands");
    (*slots)[(*count)++] = Operand();
  }

  // All operands: the first `results` go to in->d, the others to in->s (an address first).
  void Operands(int results, Insn* in) {
    size_t d = 0, s = 0;
    for (int index = 0; !t_.Take(";"); ++index) {
      const bool result = index < results;
      if (t_.Peek() == "[") {
        if (s == 0) {
          Address(in);
          s = 1;
        } else {  // a second address, as cp.async has
          t_.Next();
          Into(&in->s, &s);
          second_offset_ = 0;
          while (t_.Take("+")) second_offset_ += static_cast<int64_t>(ReadNumber());
          t_.Expect("]");
        }
      } else if (t_.Take("{")) {
        int n = 0;
        while (!t_.Take("}")) {
          result ? Into(&in->d, &d) : Into(&in->s, &s);
          ++n;
          t_.Take(",");
        }
        in->vec = static_cast<uint8_t>(n);
        packed_ = true;
      } else {
        do result ? Into(&in->d, &d) : Into(&in->s, &s);
        while (result && t_.Take("|"));
      }
      if (t_.Peek() != ";") t_.Expect(",");
    }
  }

  struct Signature {
    std::vector<std::pair<int64_t, size_t>> results, params;  // in local memory: offset, bytes
    int return_slot = -1;
  };

  // "call.uni (r), f, (a, b);"
  void Call() {
    Insn in;
    in.line = line_, in.file = file_;
    std::vector<std::pair<int64_t, size_t>> results, params;
    const auto list = [&](auto* out) {
      if (!t_.Take("(")) return;
      while (!t_.Take(")")) {
        const std::string name(t_.Next());
        const auto it = local_params_.find(name);
        if (it == local_params_.end()) t_.Fail("no parameter " + name);
        out->push_back(it->second);
        t_.Take(",");
      }
      t_.Take(",");
    };
    list(&results);
    const std::string name(t_.Next());
    t_.Take(",");
    list(&params);
    t_.SkipPast(";");
    in.text = std::make_shared<std::string>("call " + name);
    if (name == "__assertfail") {
      in.flow = Flow::kTrap;
      kernel_->code.push_back(in);
      return;
    }
    if (name == "vprintf") return;  // prints nothing
    if (!functions_.count(name)) throw std::runtime_error("call of " + name);
    if (std::find(called_.begin(), called_.end(), name) == called_.end()) {
      called_.push_back(name);
      // Where the function has its parameters, the first caller decides.
      signatures_[name] = {results, params, kernel_->slots++};
    }
    const Signature& to = signatures_[name];
    CopyParams(params, to.params);
    in.flow = Flow::kCall;
    in.d[0] = to.return_slot;
    calls_.emplace_back(kernel_->code.size(), name);
    kernel_->code.push_back(in);
    CopyParams(to.results, results);
  }
  void CopyParams(const std::vector<std::pair<int64_t, size_t>>& from,
                  const std::vector<std::pair<int64_t, size_t>>& to) {
    for (size_t i = 0; i < from.size() && i < to.size(); ++i) {
      if (from[i] == to[i]) continue;
      for (size_t b = 0; b < from[i].second;) {
        const size_t left = from[i].second - b;
        const char* const type = left >= 8 ? "b64" : left >= 4 ? "b32" : left >= 2 ? "b16" : "b8";
        const int slot = kernel_->slots++;
        for (const bool load : {true, false}) {
          Insn in;
          in.line = line_, in.file = file_;
          in.text = std::make_shared<std::string>("call: parameter");
          in.space = Space::kLocal;
          in.s[0] = Constant(0);
          in.offset = (load ? from[i].first : to[i].first) + static_cast<int64_t>(b);
          (load ? in.d[0] : in.s[1]) = slot;
          Decode(Opcode(std::string(load ? "ld.local." : "st.local.") + type), &in);
          kernel_->code.push_back(in);
        }
        b += SizeOf(TypeNamed(type));
      }
    }
  }

  void Instruction() {
    const size_t start = t_.position();
    try {
      InstructionHere();
    } catch (const std::runtime_error& e) {
      if (kernel_->error.empty()) {
        kernel_->error = "kernel " + kernel_->name + ": " + e.what();
      }
      t_.Seek(start);
      t_.SkipPast(";");
    }
  }

  void InstructionHere() {
    Insn in;
    in.line = line_, in.file = file_;
    const size_t start = t_.position();
    if (t_.Take("@")) {
      in.guard_not = t_.Take("!");
      in.guard = names_.at(std::string(t_.Next()));
    }
    const std::string word(t_.Next());
    const Opcode op(word);
    if (op.base == "call") {
      if (in.guard >= 0) throw std::runtime_error("a call with a guard");
      return Call();
    }
    if (op.base == "bra") {
      in.flow = Flow::kBranch;
      branches_.emplace_back(kernel_->code.size(), std::string(t_.Next()));
      t_.Expect(";");
    } else if (op.base == "ret" || op.base == "exit" || op.base == "trap" || op.base == "brkpt") {
      in.flow = op.base == "exit" || (op.base == "ret" && in_kernel_) ? Flow::kExit
                : op.base == "ret"                                    ? Flow::kReturn
                                                                      : Flow::kTrap;
      if (in.flow == Flow::kReturn) in.s[0] = return_slot_;
      t_.SkipPast(";");
    } else {
      negate_ = clock_ = packed_ = false;
      second_offset_ = 0;
      const int results = ResultsOf(op);
      Operands(results, &in);
      in.negate = negate_;
      if (second_offset_ != 0) throw std::runtime_error(word + " with an offset in its source");
      Opcode full = op;
      if (clock_) full.base = "clock";
      if (packed_ && op.base == "mov") full.base = in.d[1] >= 0 || in.s[1] < 0 ? "unpack" : "pack";
      if (full.Has("cc") || full.base == "addc" || full.base == "subc" || full.base == "madc") {
        if (kernel_->carry < 0) kernel_->carry = kernel_->slots++;
        in.d[1] = kernel_->carry;
      }
      if (!Decode(full, &in)) throw std::runtime_error("unknown instruction " + word);
      // A destination that is ignored is written somewhere.
      if (results > 0 && in.d[0] < 0) in.d[0] = kernel_->slots++;
      kernel_->talks |= in.atomic || in.scope != Scope::kWeak;
    }
    in.text = std::make_shared<std::string>(t_.Between(start, t_.position()));
    kernel_->code.push_back(in);
  }

  static int ResultsOf(const Opcode& op) {
    if (op.base == "st" || op.base == "red" || op.base == "membar" || op.base == "fence" ||
        op.base == "bar" || op.base == "barrier" || op.base == "cp" || op.base == "prefetch" ||
        op.base == "prefetchu" || op.base == "nanosleep" || op.base == "discard" ||
        op.base == "applypriority" || op.base == "griddepcontrol") {
      return (op.base == "bar" || op.base == "barrier") && op.Has("red") ? 1 : 0;
    }
    return 1;
  }

  Tokens t_;
  std::map<std::string, std::pair<uint64_t, size_t>> variables_;
  std::shared_ptr<const std::vector<std::string>> files_;
  std::vector<Storage> module_shared_;
  std::map<std::string, Tokens::Part> kernels_, functions_;
  std::map<std::string, Kernel> read_;
  // Of the kernel at hand.
  Kernel* kernel_ = nullptr;
  std::map<std::string, int> names_;
  std::map<std::string, std::pair<int64_t, size_t>> local_params_;
  Symbols addresses_;
  std::map<uint64_t, int> constants_;
  std::map<std::string, int> labels_, entries_;
  std::vector<std::pair<size_t, std::string>> branches_, calls_;
  std::vector<std::string> called_;
  std::map<std::string, Signature> signatures_;
  std::vector<int> dynamic_;
  uint32_t line_ = 0, file_ = 0;
  bool in_kernel_ = true;
  int return_slot_ = -1;
  // Of the instruction at hand.
  bool negate_ = false, clock_ = false, packed_ = false;
  int64_t second_offset_ = 0;
};

Module::Module(std::string_view text, const Place& place)
    : parser_(std::make_unique<Parser>(text, place)) {}
Module::~Module() = default;
const std::map<std::string, std::pair<uint64_t, size_t>>& Module::variables() const {
  return parser_->variables();
}
std::vector<std::string> Module::kernels() const { return parser_->Names(); }
const Kernel* Module::Read(const std::string& name) { return parser_->Read(name); }

}  // namespace cusim
