import java.io.BufferedOutputStream;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadLocalRandom;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/** The work of `src/questions/sessions.rs` with Curator. Prints the nanoseconds of each unit. */
public class Cycles {
    public static void main(String[] arguments) throws Exception {
        CuratorFramework one = connect(arguments[0]);
        CuratorFramework other = connect(arguments[0]);
        int tasks = Integer.parseInt(arguments[1]);
        long nanos = (long) (Double.parseDouble(arguments[2]) * 1e9);
        List<Long> measured = new ArrayList<>();
        // The virtual machine compiles what runs often.
        for (int round = 0; round < 2; round++) {
            measured = tasks == 0 ? handOff(one, other, nanos) : cycles(one, tasks, nanos);
        }
        PrintStream output = new PrintStream(new BufferedOutputStream(System.out));
        measured.forEach(output::println);
        output.flush();
        Runtime.getRuntime().halt(0);
    }

    static CuratorFramework connect(String servers) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(servers, 35_000, 5_000, new ExponentialBackoffRetry(100, 5));
        client.start();
        client.blockUntilConnected();
        return client;
    }

    /** Each task acquires and releases keys of its own. */
    static List<Long> cycles(CuratorFramework client, int tasks, long nanos) throws Exception {
        ExecutorService executor = Executors.newFixedThreadPool(tasks);
        List<Future<List<Long>>> all = new ArrayList<>();
        long until = System.nanoTime() + nanos;
        for (int task = 0; task < tasks; task++) {
            String path = "/curator/cycles/" + task + "-";
            all.add(executor.submit(() -> {
                List<Long> own = new ArrayList<>();
                for (int n = 0; System.nanoTime() < until; n++) {
                    InterProcessMutex mutex = new InterProcessMutex(client, path + n % 50);
                    long began = System.nanoTime();
                    mutex.acquire();
                    mutex.release();
                    own.add(System.nanoTime() - began);
                }
                return own;
            }));
        }
        List<Long> cycles = new ArrayList<>();
        for (Future<List<Long>> own : all) {
            cycles.addAll(own.get());
        }
        executor.shutdown();
        return cycles;
    }

    /** One client releases a key for which the other one waits. */
    static List<Long> handOff(CuratorFramework one, CuratorFramework other, long nanos) throws Exception {
        ExecutorService executor = Executors.newSingleThreadExecutor();
        List<Long> handoffs = new ArrayList<>();
        long until = System.nanoTime() + nanos;
        for (int n = 0; System.nanoTime() < until; n++) {
            String path = "/curator/handoff/" + n % 20;
            InterProcessMutex held = new InterProcessMutex(one, path);
            held.acquire();
            Future<Long> waiter = executor.submit(() -> {
                InterProcessMutex mutex = new InterProcessMutex(other, path);
                mutex.acquire();
                long granted = System.nanoTime();
                mutex.release();
                return granted;
            });
            Thread.sleep(30 + ThreadLocalRandom.current().nextInt(40));
            long released = System.nanoTime();
            held.release();
            handoffs.add(waiter.get() - released);
        }
        executor.shutdown();
        return handoffs;
    }
}
